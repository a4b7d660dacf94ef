"""Tokenizer folders: training, saving, loading."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from lmtrain.config.errors import UserError
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.learn_tokenizer import END_OF_TEXT, learn_bpe
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer

TEXT = "def f(x):\n\treturn x  # naïve — 東京 🚀\r\n\x00 end "


@pytest.fixture
def folder(tmp_path):
    save_tokenizer(learn_bpe(["some text to learn from, some text"], 300), str(tmp_path / "a"), eos=END_OF_TEXT)
    return tmp_path / "a"


def test_transformers_loads_the_folder_with_the_same_ids_and_any_text_is_restored(folder):
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder))
    ids = ours.backend.encode(TEXT).ids
    assert theirs.encode(TEXT) == ids
    assert theirs.decode(ids) == ours.backend.decode(ids, skip_special_tokens=False) == TEXT
    assert (theirs.eos_token, theirs.eos_token_id) == (END_OF_TEXT, ours.eos_id)
    assert len(theirs) == ours.vocab_size


def test_the_fingerprint_depends_on_the_content_not_on_the_path(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).identity == load_tokenizer(str(folder)).identity
    config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    shutil.copytree(tmp_path / "copy", tmp_path / "other")
    (tmp_path / "other" / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "a"}))
    assert load_tokenizer(str(tmp_path / "other")).fingerprint != load_tokenizer(str(folder)).fingerprint


def test_a_folder_is_loaded_again_only_if_its_files_have_changed(folder):
    first = load_tokenizer(folder)
    assert load_tokenizer(folder) is first
    save_tokenizer(learn_bpe(["entirely other text"], 300), folder, eos="<|endoftext|>")
    assert load_tokenizer(folder).fingerprint != first.fingerprint


def test_special_tokens_may_be_written_as_maps(folder):
    config = {"eos_token": {"content": END_OF_TEXT, "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.eos_id, tokenizer.bos_id) == (0, None)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "the folder holds no tokenizer.json; make one with `lmtrain tokenizer train"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", '{"a":' * 100_000, "tokenizer_config.json: not valid JSON: nested too deeply"),
        ("tokenizer.json", '{"a":' * 100_000, "tokenizer.json: not a tokenizer: "),
        (
            "tokenizer_config.json",
            '{"eos_token": "<end>"}',
            "names the token '<end>', which tokenizer.json does not have",
        ),
    ],
)
def test_a_corrupt_folder_is_a_user_error(folder, file, content, message):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        load_tokenizer(str(folder))


def test_a_tokenizer_with_a_similar_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("my_tokenizer", "my_tokens"):
        (tmp_path / folder).mkdir()
    (tmp_path / "my_tokenizer" / "tokenizer.json").touch()
    for wrong, hint in (("my_tokeniser", "'my_tokenizer'"), ("./my_tokeniser", "'./my_tokenizer'")):
        for load in (load_tokenizer, open_tokenizer):
            with pytest.raises(UserError, match=rf"did you mean {hint}\?"):
                load(wrong)
    with pytest.raises(UserError, match="tokenizer 'other': no such folder; make one with"):
        load_tokenizer("other")
