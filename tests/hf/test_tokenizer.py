"""Tokenizer folders: training, saving, loading."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from lmtrain.data.config import DataConfig
from lmtrain.hf.chat_template import find_template, tokenizer_contents
from lmtrain.hf.extend_tokenizer import END_OF_TEXT, learn_bpe
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.special_tokens import NAMES
from lmtrain.hf.tokenizer import encode_prompt, load_tokenizer, save_tokenizer
from lmtrain.preprocess.tokenize import tokenize
from lmtrain.runtime.errors import UserError

SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
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


SETTINGS = ["{", '{"a":' * 100_000, "[]", '{"eos_token": 3}', '{"eos_token": {"text": "a"}}']
SETTINGS += ['{"added_tokens_decoder": {"x": {"content": "a"}}}', '{"added_tokens_decoder": {"5": "a"}}']
SETTINGS += ['{"extra_special_tokens": "a"}']


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "("}}}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}}),
        ("tokenizer.json", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
        ("tokenizer.json", '{"a":' * 100_000),
        *(("tokenizer_config.json", text) for text in SETTINGS),
        ("special_tokens_map.json", '{"pad_token": [1]}'),
        ("added_tokens.json", '{"<new>": null}'),
    ],
)
def test_a_corrupt_folder_is_a_user_error_that_names_the_file(folder, file, content):
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / file).unlink(missing_ok=True)
    if isinstance(content, dict):
        content = json.dumps(whole | content)
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=file):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(a+)+$"}}},  # more steps than the library's limit
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}, "added_tokens": []},
        {"normalizer": {"type": "Prepend", "prepend": ""}},
    ],
)
def test_a_text_on_which_the_library_fails_is_a_user_error(folder, change):
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | change))
    tokenizer = load_tokenizer(str(folder))
    for encode in (
        lambda: tokenize(["a" * 40 + "b"], tokenizer, DataConfig(enforce_eos=False)),
        lambda: encode_prompt(tokenizer, "a" * 40 + "b", "--prompt", bos=False),
    ):
        with pytest.raises(UserError, match=str(folder)):
            encode()


def test_dropout_of_merges_is_off_so_that_equal_texts_have_equal_tokens(folder, caplog):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(folder))
    assert "dropout 0.9" in caplog.text
    assert len({tuple(tokenizer.backend.encode("some text to learn").ids) for _ in range(20)}) == 1


CONFIG, MAP, ADDED, MODEL = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"
NEW = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": True, "single_word": False, "special": False}
PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
FOLDERS = {
    "special tokens": {CONFIG: {"extra_special_tokens": ["<new>"], "additional_special_tokens": ["<pad>"]}},
    "special tokens, by name": {CONFIG: {"extra_special_tokens": {"new_token": "<new>"}, "eos_token": "<pad>"}},
    "token of the model": {CONFIG: {"image_token": "<new>", "pad_token": "<pad>"}},
    "numbered": {CONFIG: {"added_tokens_decoder": {"400": NEW, "301": NEW | {"content": "<pad>", "special": True}}}},
    "numbered and named": {CONFIG: {"added_tokens_decoder": {"300": NEW}, "eos_token": "<new>", "pad_token": "<pad>"}},
    "other flags": {CONFIG: {"added_tokens_decoder": {"0": NEW | {"content": "<|endoftext|>", "lstrip": True}}}},
    "end of text outside the vocabulary": {CONFIG: {"eos_token": "<new>", "bos_token": "<|endoftext|>"}},
    "end of text is a plain token": {CONFIG: {"eos_token": "a"}},
    "null": {CONFIG: {"eos_token": None, "pad_token": None}},
    "map": {CONFIG: None, MAP: {"eos_token": "<|endoftext|>", "pad_token": {**NEW, "content": "<pad>"}}},
    "map, another end of text": {CONFIG: {"eos_token": "<|endoftext|>"}, MAP: {"eos_token": "<new>"}},
    "map, special tokens": {CONFIG: {}, MAP: {"additional_special_tokens": ["<new>"], "sep_token": "<pad>"}},
    "map without effect": {CONFIG: {"added_tokens_decoder": {}}, MAP: {"eos_token": "<|endoftext|>"}},
    "added": {CONFIG: {"pad_token": "<pad>"}, ADDED: {"<pad>": 301, "<new>": 300}},
    "added without effect": {CONFIG: {"added_tokens_decoder": {}}, ADDED: {"<new>": 300}},
    "class": {CONFIG: {"tokenizer_class": "GPT2Tokenizer"}},
    "class without an end of text": {CONFIG: {"tokenizer_class": "GPT2Tokenizer", "eos_token": None}},
    "class of the model": {CONFIG: {"model_max_length": 9}, MODEL: {"model_type": "gpt2"}},
    "generic class": {CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast"}, MODEL: {"model_type": "gpt2"}},
    "padding of tokenizer.json": {CONFIG: {}, "tokenizer.json": {"padding": PADDING}},
    "padding of tokenizer.json, null": {CONFIG: {"pad_token": None}, "tokenizer.json": {"padding": PADDING}},
    "unknown class": {CONFIG: {"tokenizer_class": "OurTokenizer", "eos_token": "<new>"}},
}


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_tokens_that_the_folder_declares_elsewhere_are_those_of_transformers(folder, files):
    for name, content in files.items():
        if name == "tokenizer.json":
            content |= {k: v for k, v in json.loads((folder / name).read_text()).items() if k not in content}
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    assert len(theirs) == ours.vocab_size
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_id, ours.bos_id)
    for text in ("a <new>b <pad><|endoftext|>  <|endoftext|>", "text to learn <new>", "<pad> a"):
        assert theirs.encode(text, add_special_tokens=False) == ours.backend.encode(text, add_special_tokens=False).ids
    assert dict(find_template(str(folder), "{{ eos_token }}", "x").tokens) == {
        name: token for name, token in theirs.special_tokens_map.items() if name in NAMES
    }
    # the files that an export and a run keep are the same tokenizer without the model's config.json
    for name, content in tokenizer_contents(str(folder)).items():
        (folder.parent / "kept").mkdir(exist_ok=True)
        (folder.parent / "kept" / name).write_bytes(content)
    assert load_tokenizer(str(folder.parent / "kept")).identity == ours.identity


def test_a_declared_token_changes_the_identity_and_is_logged_once(folder, caplog):
    caplog.set_level("INFO")
    before = load_tokenizer(str(folder)).identity
    assert caplog.messages == []
    (folder / ADDED).write_text('{"<new>": 400}')
    after = load_tokenizer(str(folder))
    assert after.identity["fingerprint"] != before["fingerprint"]
    assert after.vocab_size == before["vocab_size"] + 1
    added, number = caplog.messages
    assert "<new>" in added
    assert f"id {after.backend.token_to_id('<new>')}" in number
    assert "400" in number


def test_a_tokenizer_with_a_similar_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("my_tokenizer", "my_tokens"):
        (tmp_path / folder).mkdir()
    (tmp_path / "my_tokenizer" / "tokenizer.json").touch()
    for wrong, hint in (("my_tokeniser", "'my_tokenizer'"), ("./my_tokeniser", "'./my_tokenizer'")):
        for load in (load_tokenizer, open_tokenizer):
            with pytest.raises(UserError, match=hint):
                load(wrong)
    with pytest.raises(UserError, match="'other': no such folder"):
        load_tokenizer("other")
