"""Creation of the demo when a config uses it, and only of its missing files."""

import sysconfig

import pytest

from lmtrain.data.config import DataConfig
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess import prepare_demo
from lmtrain.preprocess.input_files import expand_urls
from lmtrain.runtime.errors import UserError


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    folder.mkdir()
    for i in range(200):
        (folder / f"m{i}.py").write_text(f"def function_{i}(argument):\n    return argument + {i}\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(prepare_demo, "MINIMUM_BYTES", 1000)
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


@pytest.mark.parametrize("lost", ["validation.jsonl.gz", "train.3-of-8.jsonl.gz", "tokenizer/tokenizer.json"])
def test_only_missing_files_are_created_with_the_same_bytes(library, tmp_path, lost):
    config = DataConfig(demo=str(tmp_path / "demo"))
    prepare_demo.prepare_demo(config)
    before = {path: path.read_bytes() for path in (tmp_path / "demo").rglob("*") if path.is_file()}
    assert len(before) == 11
    times = mtimes(tmp_path / "demo")
    prepare_demo.prepare_demo(config)
    assert mtimes(tmp_path / "demo") == times
    (tmp_path / "demo" / lost).unlink()
    prepare_demo.prepare_demo(config)
    assert {path: path.read_bytes() for path in before} == before


def test_no_tokenizer_is_trained_for_a_config_with_its_own(library, tmp_path, settings):
    prepare_demo.prepare_demo(DataConfig(demo=str(tmp_path / "demo"), tokenizer=settings["data"]["tokenizer"]))
    assert not (tmp_path / "demo" / "tokenizer").exists()
    assert (tmp_path / "demo" / "validation.jsonl.gz").exists()


def test_a_config_without_the_demo_creates_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare_demo.prepare_demo(DataConfig(train_urls=["a.jsonl"]))
    assert list(tmp_path.iterdir()) == []


def test_a_too_small_library_is_a_user_error(library, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_demo, "MINIMUM_BYTES", 10**9)
    with pytest.raises(UserError, match=r"holds 0\.0 MB of Python source"):
        prepare_demo.prepare_demo(DataConfig(demo=str(tmp_path / "demo")))
