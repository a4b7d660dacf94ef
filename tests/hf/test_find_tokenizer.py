"""Every way to name a tokenizer leads to a folder that loads, and what cannot be had says why."""

import json
import os
import shutil
import subprocess
import sys

import fsspec
import pytest
from conftest import TOKENIZER

from lmtrain.config.errors import UserError
from lmtrain.hf.find_tokenizer import cache_folder, find_tokenizer, open_tokenizer

TEXTS = ["def f(x):\n    return x\n", "ünï ☃ 🙂", "", "a  b\t\r\n", "<|endoftext|>"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_folder_is_itself():
    assert find_tokenizer(str(TOKENIZER)) == str(TOKENIZER)


def test_byte_is_every_byte_by_its_number_and_an_end():
    tokenizer = open_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    for text in TEXTS[:-1]:
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert ids == list(text.encode())
        assert tokenizer.backend.decode(ids) == text


def test_byte_loads_in_transformers_with_the_same_ids():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(find_tokenizer("byte"))
    assert theirs.eos_token_id == 256
    assert theirs("ünï", add_special_tokens=False)["input_ids"] == list("ünï".encode())


def test_a_url_is_copied_once_and_is_the_same_tokenizer():
    for file in TOKENIZER.iterdir():
        with fsspec.open(f"memory://tok/{file.name}", "wb") as target:
            target.write(file.read_bytes())
    folder = find_tokenizer("memory://tok/")
    assert open_tokenizer("memory://tok").identity == open_tokenizer(str(TOKENIZER)).identity
    before = os.stat(os.path.join(folder, "tokenizer.json")).st_mtime_ns
    assert find_tokenizer("memory://tok") == folder
    assert os.stat(os.path.join(folder, "tokenizer.json")).st_mtime_ns == before


def test_nothing_half_made_is_left_or_taken_for_whole(tmp_path):
    folder = find_tokenizer("byte")
    os.remove(os.path.join(folder, "tokenizer.json"))
    shutil.rmtree(folder)
    os.makedirs(f"{folder}.tmp-{os.getpid()}")
    assert find_tokenizer("byte") == folder
    assert os.listdir(cache_folder()) == ["byte"]


def test_a_hub_id_is_read_from_the_hubs_cache_without_a_network(tmp_path):
    """In its own process: the hub's libraries read where their cache is when they are imported."""
    snapshot = tmp_path / "hf" / "hub" / "models--acme--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(TOKENIZER, snapshot)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    code = "from lmtrain.hf.find_tokenizer import open_tokenizer; t = open_tokenizer('acme/tiny')"
    code += "; print(t.vocab_size, t.eos_id, t.path)"
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf")}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)  # the second time, its own copy is enough
    ours = open_tokenizer(str(TOKENIZER))
    assert found[0] == found[1]
    assert found[0][:2] == [str(ours.vocab_size), str(ours.eos_id)]
    folder = found[0][2]
    for text in TEXTS:
        ids = open_tokenizer(folder).backend.encode(text, add_special_tokens=False).ids
        assert ids == ours.backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder", "no such folder; make one with `lmtrain tokenizer train --output no/such/folder FILES`"),
        ("acme/none", "not to be had from the Hugging Face hub"),
        ("memory://none", "there is no tokenizer.json"),
        ("nonsense://x", "Protocol not known: nonsense"),
        ("gone.model", "cannot be read"),
    ],
)
def test_what_cannot_be_had_says_why(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        find_tokenizer(name)
    assert str(caught.value).startswith(f"tokenizer {name!r}: ")
    assert message in str(caught.value)
