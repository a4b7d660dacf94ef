"""Description and splitting of input files, and which changes of one are noticed."""

import gzip

import fsspec
import pytest

from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.input_files import FilesMissingError
from lmtrain.preprocess.sources import (
    as_recorded,
    as_recorded_in,
    describe_source,
    list_sources,
    source_checksums,
    split_source,
)
from lmtrain.runtime.errors import UserError


def make(folder, *names, content=b"text"):
    for name in names:
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in names]


@pytest.mark.parametrize("place", [0, 4095, 400_000, -4096, -1], ids=str)
def test_the_fingerprint_detects_a_change_at_either_end(tmp_path, place):
    # `place` in the middle is not read: such a change is detected by its time
    content = bytearray(b"x" * 500_000)
    before, same = map(describe_source, make(tmp_path, "a.jsonl", "b.jsonl", content=bytes(content)))
    assert before.fingerprint == same.fingerprint
    content[place] = ord("y")
    after = describe_source(make(tmp_path, "a.jsonl", content=bytes(content))[0])
    assert (before.fingerprint == after.fingerprint) == (place == 400_000)
    assert before.bytes == after.bytes == 500_000
    longer = describe_source(make(tmp_path, "a.jsonl", content=b"x" * 500_001)[0])
    assert longer.fingerprint != before.fingerprint


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.parquet"])
def test_other_formats_than_lines_are_not_split(tmp_path, name):
    source = describe_source(make(tmp_path, name, content=b"x" * 1000)[0])
    assert split_source(source, 10) == [source]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.json.gz"])
def test_a_pointer_of_git_lfs_is_a_missing_file(tmp_path, name):
    with pytest.raises(FilesMissingError, match=rf"{name}: .*Git LFS.*git lfs pull"):
        describe_source(make(tmp_path, name, content=POINTER)[0])


@pytest.mark.parametrize("page", ["<!DOCTYPE html>\n<html>", "\n <HTML><body>", '<?xml version="1.0"?><Error>'])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.txt.gz"])
def test_a_page_of_a_web_server_is_refused_but_may_be_text(tmp_path, name, page):
    with pytest.raises(UserError, match=rf"{name}: a page in HTML or XML"):
        describe_source(make(tmp_path, name, content=page.encode())[0])
    assert describe_source(make(tmp_path, "a.txt", content=page.encode())[0]).bytes == len(page)


@pytest.mark.parametrize(
    ("content", "ending"), [(gzip.compress(b"text", mtime=0), ".gz"), (b"PAR1 and more", ".parquet")]
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_file_of_another_format_than_its_name_is_refused(tmp_path, name, content, ending):
    with pytest.raises(UserError, match=rf"{name}: its content is that of a {ending}"):
        describe_source(make(tmp_path, name, content=content)[0])


def test_copies_among_the_files_of_a_split_are_logged(tmp_path, caplog):
    config = DataConfig(train_urls=make(tmp_path, "a.jsonl", "b.jsonl"), tokenizer="byte")
    list_sources(config, "train", open_tokenizer("byte", None))
    assert f"{tmp_path}/a.jsonl = {tmp_path}/b.jsonl" in caplog.text
    caplog.clear()
    make(tmp_path, "b.jsonl", content=b"other")
    assert len(list_sources(config, "train", open_tokenizer("byte", None))) == 2
    assert not caplog.text


def test_a_file_at_a_url_with_another_version_is_compared_by_parts():
    memory, url = fsspec.filesystem("memory"), "memory:///versions/a.jsonl"
    content = b"x" * 500_000
    memory.pipe_file("/versions/a.jsonl", content)
    source = describe_source(url)
    cached = as_recorded(source) | source_checksums(source)
    assert cached["modified"] is not None
    assert "sha256" not in cached  # which would read the file once more
    memory.pipe_file("/versions/a.jsonl", content)
    again = describe_source(url)
    assert again != source
    assert as_recorded_in(again, cached) == cached
    memory.pipe_file("/versions/a.jsonl", content[:10_000] + b"y" * 480_000 + content[-10_000:])
    edited = describe_source(url)
    assert edited.fingerprint == source.fingerprint
    assert as_recorded_in(edited, cached) != cached
    memory.rm("/versions", recursive=True)
