"""Which files paths and patterns stand for, what is refused, and which changes of a file are noticed."""

import gzip
import os
import shutil
import socket

import fsspec
import pytest

from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.input_files import FilesMissingError, expand_urls, format_of
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


def test_braces_expand_in_the_order_written_and_globs_in_sorted_order(tmp_path):
    b2, b10, a1, c = make(tmp_path, "b.2.jsonl", "b.10.jsonl", "a.1.jsonl", "c.jsonl")
    assert expand_urls([f"{tmp_path}/c.jsonl", f"{tmp_path}/b.{{2..10..8}}.jsonl", a1]) == [c, b2, b10, a1]
    assert expand_urls([f"{tmp_path}/{{b,a}}.*.jsonl"]) == [b10, b2, a1]
    assert expand_urls(make(tmp_path, "part[1].jsonl")) == [f"{tmp_path}/part[1].jsonl"]


def test_every_missing_file_is_named_at_once(tmp_path):
    make(tmp_path, "a.1.jsonl")
    with pytest.raises(FilesMissingError) as error:
        expand_urls([f"{tmp_path}/a.{{1..3}}.jsonl", f"{tmp_path}/none*.jsonl"])
    assert str(error.value).endswith(f" {tmp_path}/a.2.jsonl, {tmp_path}/a.3.jsonl, {tmp_path}/none*.jsonl")


def test_a_file_listed_twice_also_under_two_names_is_refused(tmp_path, monkeypatch):
    a, _ = make(tmp_path, "a.jsonl", "b.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(a)
    for other in ("a.jsonl", f"{tmp_path}/./a.jsonl", "link.jsonl"):
        with pytest.raises(UserError) as error:
            expand_urls([a, "b.jsonl", other])
        assert f"{a} = {other}" in str(error.value)
    with pytest.raises(UserError, match=r"more than once: .*a\.jsonl"):
        expand_urls([a, f"{tmp_path}/a*.jsonl"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.docx", "unsupported format"),
        ("a.parquet.gz", "unsupported format"),
        ("a.jsonl.lz4", "unsupported format"),
        ("a.gz", "unsupported format"),
        ("{a.jsonl", "braces"),
        ("a**.jsonl", r"\*\*/\*"),
    ],
)
def test_an_unreadable_name_is_an_error_with_the_reason(tmp_path, name, message):
    make(tmp_path, name.replace("*", "b"))
    with pytest.raises(UserError, match=message):
        expand_urls([f"{tmp_path}/{name}"])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host/a.jsonl?X-Amz-Signature=a.b", (".jsonl", None)),
        ("https://host/a.jsonl.gz?download=true#part", (".jsonl", "gzip")),
        ("https://host/download?file=a.txt", (".txt", None)),
        ("s3://bucket/a?.jsonl", (".jsonl", None)),
    ],
)
def test_the_format_is_that_of_the_path_of_a_url_and_the_query_of_another_is_not_printed(url, expected):
    assert format_of(url) == expected
    with pytest.raises(UserError, match=r"^https://host/a\.csv: "):
        format_of("https://host/a.csv?X-Amz-Signature=cafe")
    with pytest.raises(UserError, match=r"nonsense://a.jsonl"):
        expand_urls(["nonsense://a.jsonl"])


TREE = ["a.jsonl", "._a.jsonl", ".ipynb_checkpoints/a.jsonl", "s/b.jsonl", "s/.c.jsonl", ".cache/d/e.jsonl"]


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """A folder with hidden files and folders."""
    if request.param == "local":
        for name in TREE:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(b"text")
        yield str(tmp_path)
        return
    memory = fsspec.filesystem("memory")
    for name in TREE:
        memory.pipe_file(f"/hidden/{name}", b"text")
    yield "memory:///hidden"
    memory.rm("/hidden", recursive=True)


@pytest.mark.parametrize(
    ("pattern", "expected", "hidden"),
    [
        ("*.jsonl", ["a.jsonl"], 1),
        ("**/*.jsonl", ["a.jsonl", "s/b.jsonl"], 4),
        ("s/*.jsonl", ["s/b.jsonl"], 1),
        (".*.jsonl", ["._a.jsonl"], 0),
        (".ipynb_checkpoints/*.jsonl", [".ipynb_checkpoints/a.jsonl"], 0),
        ("*/.c.jsonl", ["s/.c.jsonl"], 0),
        (".cache/**/*.jsonl", [".cache/d/e.jsonl"], 0),
        (".[a-h]*/d/f.jsonl", [], 0),
    ],
)
def test_hidden_files_and_folders_match_as_in_a_shell_and_are_counted(root, pattern, expected, hidden, caplog):
    caplog.set_level("INFO")
    if expected:
        assert expand_urls([f"{root}/{pattern}"]) == [f"{root}/{name}" for name in expected]
    else:
        with pytest.raises(FilesMissingError):
            expand_urls([f"{root}/{pattern}"])
    messages = [line for record in caplog.records if "hidden file" in (line := record.getMessage())]
    assert len(messages) == (hidden > 0)
    assert all(f"{pattern}: without {hidden} hidden file" in line for line in messages)


def test_links_to_files_and_folders_match_a_pattern(tmp_path):
    (tmp_path / "real").mkdir()
    make(tmp_path / "real", "a.jsonl")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "b.jsonl").symlink_to("../real/a.jsonl")
    (tmp_path / "links" / "folder").symlink_to("../real")
    assert expand_urls([f"{tmp_path}/links/*.jsonl"]) == [f"{tmp_path}/links/b.jsonl"]
    assert expand_urls([f"{tmp_path}/links/*/*.jsonl"]) == [f"{tmp_path}/links/folder/a.jsonl"]
    with pytest.raises(UserError, match="listed more than once"):
        expand_urls([f"{tmp_path}/**/*.jsonl"])


@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl"])
@pytest.mark.parametrize("kind", ["named pipe", "socket", "does not exist", "device", "folder"])
def test_what_is_no_file_is_an_error_that_says_what_it_is(tmp_path, monkeypatch, kind, pattern):
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    make(tmp_path, "b.jsonl")
    if kind == "named pipe":
        os.mkfifo("a.jsonl")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("a.jsonl")
    elif kind == "folder":
        os.mkdir("a.jsonl")
    else:
        os.symlink("/dev/null" if kind == "device" else "nowhere", "a.jsonl")
    with pytest.raises(FilesMissingError if kind == "does not exist" else UserError, match=rf"a\.jsonl: .*{kind}"):
        expand_urls([pattern])


@pytest.mark.parametrize("pattern", ["x.parquet", "*.parquet", "*"])
@pytest.mark.parametrize("place", ["", "lang=en/"])
def test_a_folder_that_spark_wrote_is_an_error_with_the_pattern_of_its_files(tmp_path, monkeypatch, place, pattern):
    monkeypatch.chdir(tmp_path)
    parts = [f"x.parquet/{place}part-{i}.snappy.parquet" for i in range(2)]
    for name in ["y.parquet", "x.parquet/_SUCCESS", f"x.parquet/{place}.part-0.snappy.parquet.crc", *parts]:
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        make(tmp_path, name)
    with pytest.raises(UserError, match=r"x\.parquet: is a folder") as error:
        expand_urls([pattern])
    suggested = str(error.value).rpartition(" ")[2].strip("'")
    assert [os.path.relpath(name) for name in expand_urls([suggested])] == parts
    assert len(expand_urls(["**/*.parquet"])) == 3
    shutil.rmtree("x.parquet")
    os.mkdir("x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet: is a folder, without"):
        expand_urls([pattern])


def test_a_name_that_is_not_utf8_is_refused_at_once(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    with open(name, "wb") as file:
        file.write(b"text")
    with pytest.raises(UserError, match=r"caf.*not UTF-8"):
        expand_urls([f"{tmp_path}/*.jsonl"])


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
