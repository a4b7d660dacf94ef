"""Creation of the demo when a config uses it, and only of its missing files."""

import json
import sysconfig

import pytest

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess import demo, prepare_demo
from lmtrain.preprocess.demo import file_names
from lmtrain.preprocess.learn import learn_from_files
from lmtrain.preprocess.sources import expand_urls


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    folder.mkdir()
    for i in range(200):
        (folder / f"m{i}.py").write_text(f"def function_{i}(argument):\n    return argument + {i}\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(demo, "MINIMUM_BYTES", 1000)
    return folder


def mtimes(folder):
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["demo", "demo/", "folder [1]/demo", "{demo}"])
def test_corpus_and_tokenizer_are_created_where_the_config_reads_them(library, tmp_path, name):
    config = DataConfig(demo=str(tmp_path) + "/" + name)
    prepare_demo.prepare_demo(config)
    assert len(expand_urls(config.urls("train"))) == 8
    assert len(expand_urls(config.urls("validation"))) == 1
    tokenizer = load_tokenizer(config.tokenizer)
    assert tokenizer.eos_id is not None
    assert 256 < tokenizer.vocab_size <= prepare_demo.VOCAB_SIZE


def test_existing_files_are_not_modified(library, tmp_path):
    config = DataConfig(demo=str(tmp_path / "demo"))
    prepare_demo.prepare_demo(config)
    before = mtimes(tmp_path / "demo")
    prepare_demo.prepare_demo(config)
    assert mtimes(tmp_path / "demo") == before
    assert len(before) == 11


@pytest.mark.parametrize("lost", ["validation.jsonl.gz", "train.3-of-8.jsonl.gz"])
def test_a_missing_file_is_recreated_with_the_same_bytes(library, tmp_path, lost):
    config = DataConfig(demo=str(tmp_path / "demo"))
    prepare_demo.prepare_demo(config)
    before = {name: (tmp_path / "demo" / name).read_bytes() for name in file_names()}
    (tmp_path / "demo" / lost).unlink()
    prepare_demo.prepare_demo(config)
    assert {name: (tmp_path / "demo" / name).read_bytes() for name in file_names()} == before


def test_an_unfinished_tokenizer_folder_of_a_killed_run_is_completed(library, tmp_path):
    config = DataConfig(demo=str(tmp_path / "demo"))
    prepare_demo.prepare_demo(config)
    file = tmp_path / "demo" / "tokenizer" / "tokenizer.json"
    content = file.read_bytes()
    file.unlink()
    prepare_demo.prepare_demo(config)
    assert file.read_bytes() == content


def test_no_tokenizer_is_trained_for_a_config_with_its_own(library, tmp_path, settings):
    prepare_demo.prepare_demo(DataConfig(demo=str(tmp_path / "demo"), tokenizer=settings["data"]["tokenizer"]))
    assert not (tmp_path / "demo" / "tokenizer").exists()
    assert (tmp_path / "demo" / "validation.jsonl.gz").exists()


def test_a_config_without_the_demo_creates_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare_demo.prepare_demo(DataConfig(train_urls=["a.jsonl"]))
    assert list(tmp_path.iterdir()) == []


def test_a_too_small_library_is_a_user_error(library, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "MINIMUM_BYTES", 10**9)
    with pytest.raises(UserError, match=r"holds 0\.0 MB of Python source"):
        prepare_demo.prepare_demo(DataConfig(demo=str(tmp_path / "demo")))


def test_training_from_files_expands_braces_and_uses_the_text_key(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": f"{name}{name}{name} " * 50}) + "\n")
    count = learn_from_files([f"{tmp_path}/{{a,b}}.jsonl"], "body", 300, str(tmp_path / "tok"))
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert tokenizer.vocab_size == count
    assert len(tokenizer.backend.encode(" aaa bbb").ids) == 2
