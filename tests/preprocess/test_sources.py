"""Expansion, description and splitting of input files."""

import pytest

from lmtrain.config.errors import UserError
from lmtrain.preprocess.sources import FilesMissingError, describe_source, expand_urls, format_of, split_source


def make(folder, *names, content=b"text"):
    for name in names:
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in names]


def test_braces_expand_in_the_order_written_and_globs_in_sorted_order(tmp_path):
    b2, b10, a1, c = make(tmp_path, "b.2.jsonl", "b.10.jsonl", "a.1.jsonl", "c.jsonl")
    assert expand_urls([f"{tmp_path}/c.jsonl", f"{tmp_path}/b.{{2..10..8}}.jsonl", a1]) == [c, b2, b10, a1]
    assert expand_urls([f"{tmp_path}/{{b,a}}.*.jsonl"]) == [b10, b2, a1]


def test_every_missing_file_is_named_at_once(tmp_path):
    make(tmp_path, "a.1.jsonl")
    with pytest.raises(FilesMissingError) as error:
        expand_urls([f"{tmp_path}/a.{{1..3}}.jsonl", f"{tmp_path}/none*.jsonl"])
    missing = f"no such file: {tmp_path}/a.2.jsonl, {tmp_path}/a.3.jsonl, {tmp_path}/none*.jsonl"
    assert str(error.value) == missing


def test_a_file_listed_twice_also_under_two_names_is_refused(tmp_path, monkeypatch):
    a, _ = make(tmp_path, "a.jsonl", "b.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to(a)
    for other in ("a.jsonl", f"{tmp_path}/./a.jsonl", "link.jsonl"):
        with pytest.raises(UserError) as error:
            expand_urls([a, "b.jsonl", other])
        assert str(error.value) == f"listed more than once: {a} = {other}"
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
    ],
)
def test_an_unreadable_name_is_an_error_with_the_reason(tmp_path, name, message):
    make(tmp_path, name)
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
def test_the_format_is_that_of_the_path_of_a_url(url, expected):
    assert format_of(url) == expected


def test_the_query_of_an_unsupported_url_is_not_printed():
    with pytest.raises(UserError, match=r"^https://host/a\.csv: unsupported format"):
        format_of("https://host/a.csv?X-Amz-Signature=cafe")


def test_an_unknown_protocol_is_a_user_error():
    with pytest.raises(UserError, match=r"nonsense://a.jsonl"):
        expand_urls(["nonsense://a.jsonl"])


@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl"])
def test_a_folder_is_not_read_as_a_file(tmp_path, pattern):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UserError, match="jsonl"):
        [describe_source(url) for url in expand_urls([f"{tmp_path}/{pattern}"])]


def test_a_file_with_glob_characters_in_its_name_is_found(tmp_path):
    assert expand_urls(make(tmp_path, "part[1].jsonl")) == [f"{tmp_path}/part[1].jsonl"]


@pytest.mark.parametrize("place", [0, 4095, 400_000, -4096, -1], ids=str)
def test_the_fingerprint_detects_a_change_at_either_end(tmp_path, place):
    # `place` in the middle is not read: such a change is detected by its size only
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
