"""The manifest: it reads back as written, and any corruption of it or of the files is found."""

import os

import pytest

from lmtrain.checkpoint import manifest as module
from lmtrain.checkpoint.config import Kind
from lmtrain.checkpoint.manifest import (
    NAME,
    DamagedError,
    FileRecord,
    Manifest,
    check_sizes,
    read_manifest,
    record_files,
    write_manifest,
    wrong_bytes,
)
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import delete_file, join, write_bytes

BLOCK = 8
CONTENTS = {
    "empty": b"",
    "a byte": b"x",
    "less than a block": b"x" * (BLOCK - 1),
    "a block": b"x" * BLOCK,
    "a byte more": b"x" * (BLOCK + 1),
    "two blocks": b"x" * 2 * BLOCK,
    "deep/in/ö": bytes(range(256)),
}
SMALL = Manifest(
    step=1234567, kind=Kind.TEMPORARY, saved=1795282636.4889033, files={"ö/a": FileRecord(1234567, "0f" * 16)}
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", BLOCK)


@pytest.fixture
def files(folder, put):
    """A folder with one file for each entry of `CONTENTS`."""
    for name, content in CONTENTS.items():
        put(folder, *name.split("/"), content=content)
    return folder


@pytest.mark.parametrize(
    ("step", "saved", "files"),
    [(0, 0.0, {}), (2**40, 1e-7, {"b": FileRecord(0, ""), 'a"\\\n': FileRecord(2**50, "ff")})],
    ids=["empty", "odd"],
)
def test_a_manifest_reads_back_as_it_was_written(step, saved, files, folder, put):
    put(folder, "before")
    with pytest.raises(FileNotFoundError):
        read_manifest(folder)
    manifest = Manifest(step=step, kind=Kind.PERMANENT, saved=saved, files=files)
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    assert manifest.size == sum(record.size for record in manifest.files.values())


@pytest.fixture
def path(tmp_path):
    """The file of the manifest `SMALL`."""
    write_manifest(str(tmp_path), SMALL)
    return tmp_path / NAME


def test_no_changed_byte_of_a_manifest_goes_unnoticed(path):
    """At each position: flipped bits, a space, and characters of JSON's syntax; a digit may become an exponent."""
    content = path.read_bytes()
    accepted = []
    for place, right in enumerate(content):
        for value in {right ^ 1, right ^ 0x80, ord(" "), *b'019eE.-"{],\\\n\x00a'} - {right}:
            path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            try:
                manifest = read_manifest(str(path.parent))
            except DamagedError:
                continue
            if manifest != SMALL:
                accepted.append((place, chr(value), manifest))
    assert accepted == []


@pytest.mark.parametrize("keep", [0, 100, -1, None])
def test_a_truncated_or_extended_manifest_is_corrupt(path, keep):
    content = path.read_bytes()
    path.write_bytes(content + b"\n" if keep is None else content[:keep])
    with pytest.raises(DamagedError):
        read_manifest(str(path.parent))


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b'{"files": 1}', b"\x00" * 500, b"[" * 100_000, b'{"step": ' + b"1" * 5000 + b"}"],
    ids=["list", "empty", "number", "zeros", "deep", "long"],
)
def test_content_that_is_not_a_manifest_is_corrupt(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(DamagedError):
        read_manifest(str(tmp_path))


def test_files_are_recorded_with_sizes_and_distinct_checksums(files):
    records = record_files(files, CONTENTS)
    assert {name: record.size for name, record in records.items()} == {n: len(c) for n, c in CONTENTS.items()}
    assert len({record.checksum for record in records.values()}) == len(CONTENTS)


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK])
def test_a_changed_byte_in_any_block_is_found(folder, put, place):
    content = b"x" * (2 * BLOCK + 1)
    put(folder, "a", content=content)
    manifest = Manifest(step=1, kind=Kind.PERMANENT, saved=0.0, files=record_files(folder, ["a"]))
    assert wrong_bytes(folder, manifest, ["a"]) == []
    put(folder, "a", content=content[:place] + b"y" + content[place + 1 :])
    check_sizes(folder, manifest)
    assert wrong_bytes(folder, manifest, ["a"]) == ["a"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"a block": 7}, "a block .*7.* 8"),
        ({"a byte": None, "deep/in/ö": None}, "a byte .*deep/in/ö "),
        ({"notes.txt": 9}, None),  # an additional file is ignored
    ],
)
def test_all_files_of_a_wrong_size_are_named(files, sizes, message):
    manifest = Manifest(step=1, kind=Kind.PERMANENT, saved=0.0, files=record_files(files, CONTENTS))
    check_sizes(files, manifest)
    for name, size in sizes.items():
        if size is None:
            delete_file(join(files, name))
        else:
            write_bytes(join(files, name), b"x" * size)
    if message is None:
        check_sizes(files, manifest)
        return
    with pytest.raises(DamagedError, match=message):
        check_sizes(files, manifest)


def test_the_checksum_depends_on_the_content_only_and_not_on_threads_or_the_store(tmp_path, put, monkeypatch):
    content = os.urandom(100 * BLOCK)
    for folder in (str(tmp_path), f"memory://{tmp_path}"):
        put(folder, "a", content=content)
    put(str(tmp_path), "swapped", content=content[BLOCK:] + content[:BLOCK])
    expected = record_files(f"memory://{tmp_path}", ["a"])["a"]
    for count in (1, 32):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        records = record_files(str(tmp_path), ["a", "swapped"])
        assert records["a"] == expected != records["swapped"]


def test_a_manifest_of_another_version_is_not_reported_as_corrupt(tmp_path, monkeypatch):
    """Otherwise the checkpoints of a newer version of lmtrain would be set aside."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_FORMAT", 2)
        write_manifest(str(tmp_path), SMALL)
    with pytest.raises(UserError, match="format 2"):
        read_manifest(str(tmp_path))
