"""Every form of a tokenizer name resolves to a folder that loads, or is an error with the reason."""

import json
import os
import shutil
import subprocess
import sys

import fsspec
import pytest
from conftest import TOKENIZER
from sentencepiece_texts import train

from lmtrain.hf.chat_template import read_templates
from lmtrain.hf.find_tokenizer import cache_folder, find_tokenizer, open_tokenizer
from lmtrain.hf.special_tokens import read_declared
from lmtrain.runtime.errors import UserError

TEXTS = ["def f(x):\n    return x\n", "ünï ☃ 🙂", "", "a  b\t\r\n", "<|endoftext|>"]


def ids(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_byte_maps_each_byte_to_its_value_and_has_an_end_token_also_in_transformers():
    from transformers import AutoTokenizer

    tokenizer, theirs = open_tokenizer("byte"), AutoTokenizer.from_pretrained(find_tokenizer("byte"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, theirs.eos_token_id) == (257, 256, 256)
    for text in TEXTS[:-1]:
        assert ids(tokenizer, text) == theirs(text, add_special_tokens=False)["input_ids"] == list(text.encode())
        assert tokenizer.backend.decode(list(text.encode())) == text


def test_a_url_is_copied_once_and_is_the_same_tokenizer():
    for file in TOKENIZER.iterdir():
        with fsspec.open(f"memory://tok/{file.name}", "wb") as target:
            target.write(file.read_bytes())
    assert find_tokenizer(str(TOKENIZER)) == str(TOKENIZER)
    folder = find_tokenizer("memory://tok/")
    assert open_tokenizer("memory://tok").identity == open_tokenizer(str(TOKENIZER)).identity
    before = os.stat(os.path.join(folder, "tokenizer.json")).st_mtime_ns
    assert find_tokenizer("memory://tok") == folder
    assert os.stat(os.path.join(folder, "tokenizer.json")).st_mtime_ns == before
    # the class of the model counts
    files = {"tokenizer.json": (TOKENIZER / "tokenizer.json").read_bytes(), "config.json": b'{"model_type": "gpt2"}'}
    for name, content in files.items():
        with fsspec.open(f"memory://of_gpt2/{name}", "wb") as target:
            target.write(content)
    assert open_tokenizer("memory://of_gpt2").eos_id == open_tokenizer(str(TOKENIZER)).eos_id


def test_an_unfinished_folder_is_neither_used_nor_left(tmp_path):
    folder = find_tokenizer("byte")
    os.remove(os.path.join(folder, "tokenizer.json"))
    shutil.rmtree(folder)
    os.makedirs(f"{folder}.tmp-{os.getpid()}")
    assert find_tokenizer("byte") == folder
    assert os.listdir(cache_folder()) == ["byte"]


@pytest.mark.parametrize(
    ("variable", "cache", "blocked"), [("HOME", ".cache", "lmtrain"), ("XDG_CACHE_HOME", "", "lmtrain/tokenizers")]
)
def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path, monkeypatch, variable, cache, blocked):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    file = tmp_path / "home" / cache / blocked
    file.parent.mkdir(parents=True)
    file.touch()  # instead of a folder: permissions do not stop root
    with pytest.raises(UserError, match=r"home/.*lmtrain/tokenizers: .*XDG_CACHE_HOME"):
        find_tokenizer("byte")


def test_a_hub_id_is_read_from_the_hub_cache_when_offline(tmp_path):
    """In a separate process, since the Hub libraries read the location of their cache at import."""
    snapshot = tmp_path / "hf" / "hub" / "models--acme--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(TOKENIZER, snapshot)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    code = "from lmtrain.hf.find_tokenizer import open_tokenizer; t = open_tokenizer('acme/tiny')"
    code += "; print(t.vocab_size, t.eos_id, t.path)"
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    *found, folder = done.stdout.split()
    ours = open_tokenizer(str(TOKENIZER))
    assert found == [str(ours.vocab_size), str(ours.eos_id)]
    shutil.rmtree(tmp_path / "hf")
    assert open_tokenizer("acme/tiny").path == folder  # its own copy
    assert read_templates(folder) == {"default": "{{ messages }}"}
    assert [ids(open_tokenizer(folder), text) for text in TEXTS] == [ids(ours, text) for text in TEXTS]


def tiny_pair(folder, merges):
    """The original format of GPT-2, with 256 bytes, some merges and an end token."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(a + b for a, b in merges), "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))


@pytest.mark.parametrize("given", ["tokenizer.json", "~/tokenizer.json"])
def test_a_file_resolves_to_its_folder_separately_in_each_project(tmp_path, monkeypatch, given):
    """Both use the same relative name; nothing is copied, so that a retrained tokenizer is used immediately."""
    found = []
    for project, tokenizer in (("one", TOKENIZER), ("two", find_tokenizer("byte"))):
        shutil.copytree(tokenizer, tmp_path / project / "my_tok")
        monkeypatch.chdir(tmp_path / project)
        monkeypatch.setenv("HOME", str(tmp_path / project / "my_tok"))
        name = given if given.startswith("~") else os.path.join("my_tok", given)
        found.append(open_tokenizer(name))
    assert found[0].identity == open_tokenizer(str(TOKENIZER)).identity
    assert found[1].vocab_size == 257
    assert os.listdir(cache_folder()) == ["byte"]


def test_a_json_file_with_another_name_is_identified_by_its_content(tmp_path):
    path = tmp_path / "mine.json"
    shutil.copy(TOKENIZER / "tokenizer.json", path)
    assert open_tokenizer(str(path)).vocab_size == open_tokenizer(str(TOKENIZER)).vocab_size
    shutil.copy(os.path.join(find_tokenizer("byte"), "tokenizer.json"), path)
    assert open_tokenizer(str(path)).vocab_size == 257


@pytest.mark.parametrize("given", ["", "vocab.json", "merges.txt"])
def test_vocab_and_merges_give_the_tokenizer_of_gpt2(tmp_path, given):
    from transformers import GPT2TokenizerFast

    folder = tmp_path / "pair"
    tiny_pair(folder, [("r", "e"), ("t", "u"), ("re", "tu"), ("Ġ", "x")])
    ours = open_tokenizer(str(folder / given))
    theirs = GPT2TokenizerFast.from_pretrained(find_tokenizer(str(folder)))
    assert ours.eos_id == ours.bos_id == theirs.eos_token_id == 260
    for text in TEXTS:
        assert ids(ours, text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.backend.decode(ids(ours, text), skip_special_tokens=False) == text
    tiny_pair(folder, [("d", "e")])  # retrained
    assert open_tokenizer(str(folder / given)).vocab_size == 258


def test_a_folder_with_only_a_sentencepiece_model_is_converted_with_its_other_tokens_and_template(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train(model_type="bpe"))
    alone = open_tokenizer(str(tmp_path))
    assert alone.identity == open_tokenizer(str(tmp_path / "tokenizer.model")).identity
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": alone.vocab_size}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<unk>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    extended = open_tokenizer(str(tmp_path))
    assert (extended.vocab_size, extended.eos_id) == (alone.vocab_size + 1, alone.vocab_size)
    assert read_templates(extended.path) == {"default": "{{ messages }}"}
    assert read_declared(extended.path).text("pad_token") == "<unk>"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": {"content": "de"}}}, (256, 257)),
        (
            {"special_tokens_map.json": {"eos_token": "<end>"}, "added_tokens.json": {"<end>": 258, "<new>": 259}},
            (258, 257),
        ),
    ],
)
def test_vocab_and_merges_are_converted_with_their_added_and_end_tokens(tmp_path, files, expected):
    tiny_pair(tmp_path, [("d", "e")])
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = open_tokenizer(str(tmp_path))
    assert (found.eos_id, found.bos_id) == expected
    assert found.vocab_size == (258 if len(files) == 1 else 260)


def test_a_conversion_is_the_same_in_each_process(tmp_path):
    """Its fingerprint decides whether a token cache can be used, on this host and others."""
    symbols = ["foo", "the", "bar", "<B>"]
    (tmp_path / "my.model").write_bytes(train(byte_fallback=True, user_defined_symbols=symbols, model_type="unigram"))
    code = "from lmtrain.hf.find_tokenizer import open_tokenizer; print(open_tokenizer('my.model').fingerprint)"
    environment = os.environ | {"PYTHONHASHSEED": "1", "XDG_CACHE_HOME": str(tmp_path / "other")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == open_tokenizer(str(tmp_path / "my.model")).fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_tok/tokenizer.json", "no such file"),
        ("vocab.json", "merges.txt"),
        ("text.md", "unsupported"),
        ("broken/vocab.json", "vocab.json"),
        ("no/such/folder", "lmtrain tokenizer train --output no/such/folder FILES"),
        ("acme/none", "Hub"),
        ("memory://none", "tokenizer.json"),
        ("nonsense://x", "nonsense"),
        ("gone.model", "cannot be read"),
    ],
)
def test_an_unavailable_tokenizer_is_an_error_with_the_reason(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "text.md").write_text("text")
    (tmp_path / "broken").mkdir()
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / "broken" / file).write_text("{")
    with pytest.raises(UserError) as caught:
        find_tokenizer(name)
    assert str(caught.value).startswith(f"tokenizer {name.removesuffix('/vocab.json')!r}: ")
    assert message in str(caught.value)
    assert not os.path.isdir(cache_folder()) or os.listdir(cache_folder()) == []
