"""The built-in demo corpus."""

import gzip
import json
import sysconfig

import pytest

from lmtrain.preprocess import prepare_demo
from lmtrain.preprocess.prepare_demo import file_names, write_demo_corpus


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small folder in place of the standard library: 200 modules, and some files that are not part of it."""
    folder = tmp_path / "library"
    for path in [f"m{i}.py" for i in range(150)] + [f"package/m{i}.py" for i in range(50)]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"# {path} é\n", encoding="utf-8")
    for path in ("site-packages/x.py", "__pycache__/x.py", "dist-packages/x.py", "x.txt", "package/x.so"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("not the library")
    (folder / "latin1.py").write_bytes(b"# \xe9\n")
    (folder / "empty.py").write_bytes(b"")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    return folder


@pytest.fixture
def small_is_enough(monkeypatch):
    monkeypatch.setattr(prepare_demo, "MINIMUM_BYTES", 1000)


def documents(folder):
    return {name: [json.loads(line) for line in gzip.open(folder / name)] for name in file_names()}


def test_every_file_of_the_library_is_one_document_ordered_by_path(library, small_is_enough, tmp_path):
    counted, size = write_demo_corpus(str(tmp_path / "demo"))
    found = documents(tmp_path / "demo")
    for part in found.values():
        assert [document["path"] for document in part] == sorted(document["path"] for document in part)
    everything = [document for part in found.values() for document in part]
    expected = {f"m{i}.py" for i in range(150)} | {f"package/m{i}.py" for i in range(50)}
    assert len(everything) == counted == 200
    assert {document["path"] for document in everything} == expected
    assert all(document["text"] == f"# {document['path']} é\n" for document in everything)
    assert size == sum(len(document["text"].encode()) for document in everything)
    assert found["validation.jsonl.gz"]


def test_a_file_added_to_the_library_moves_no_other(library, small_is_enough, tmp_path):
    write_demo_corpus(str(tmp_path / "before"))
    (library / "added.py").write_text("# added\n")
    write_demo_corpus(str(tmp_path / "after"))
    before, after = documents(tmp_path / "before"), documents(tmp_path / "after")
    assert {name: [d for d in part if d["path"] != "added.py"] for name, part in after.items()} == before
    (library / "added.py").unlink()
    write_demo_corpus(str(tmp_path / "after"))
    for name in file_names():  # the same library gives the same bytes
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


@pytest.mark.parametrize("exists", [True, False])
def test_a_too_small_or_missing_library_is_an_error_and_writes_nothing(library, tmp_path, monkeypatch, exists):
    folder = library if exists else tmp_path / "nothing"
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    with pytest.raises(ValueError, match=rf"^the standard library at {folder} holds 0\.0 MB .*data\.train_urls"):
        write_demo_corpus(str(tmp_path / "demo"))
    assert not (tmp_path / "demo").exists()


def test_the_library_of_the_running_python_is_large_enough(tmp_path):
    documents_written, size = write_demo_corpus(str(tmp_path))
    assert documents_written > 500
    assert size >= prepare_demo.MINIMUM_BYTES
