"""File operations for paths and URLs; errors name the path."""

import fsspec
import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import (
    check_writable,
    delete_file,
    delete_folder,
    download,
    file_size,
    is_url,
    join,
    list_files,
    list_names,
    open_fs,
    read_bytes,
    read_json,
    read_range,
    read_reliably,
    rename_folder,
    upload,
    write_bytes,
    write_json,
)

CONTENTS = [b"", b"\x00\xff" * 2_500_000]


@pytest.fixture(params=["path", "memory"])
def folder(request, tmp_path):
    """An empty folder: at a local path, then at a URL."""
    if request.param == "path":
        yield str(tmp_path / "ü folder")
        return
    url = f"memory://{tmp_path}/ü folder"
    yield url
    fs, inside = open_fs(url)
    if fs.exists(inside):
        fs.rm(inside, recursive=True)


@pytest.fixture
def files(folder):
    """`folder` with two files and a subfolder with one file."""
    fs, inside = open_fs(folder)
    fs.makedirs(f"{inside}/c")
    for name, content in (("b", b"22"), ("a", b"1"), ("c/d", b"")):
        fs.pipe_file(f"{inside}/{name}", content)
    return folder


class _Broken(fsspec.AbstractFileSystem):
    """A file system whose operations all raise `error`."""

    protocol = "broken"
    error: Exception

    def _fail(self, *arguments, **keywords):
        raise self.error

    cat_file = pipe_file = ls = info = put_file = open = find = exists = rm = rm_file = mv = cp_file = _fail


@pytest.fixture
def broken(monkeypatch):
    fsspec.register_implementation("broken", _Broken, clobber=True)
    monkeypatch.setattr(_Broken, "error", RuntimeError("the reason\nand much more"), raising=False)
    return "broken://folder/file"


DO = {
    "read_bytes": read_bytes,
    "read_json": read_json,
    "write_bytes": lambda url: write_bytes(url, b""),
    "write_json": lambda url: write_json(url, {}),
    "list_names": list_names,
    "file_size": file_size,
    "upload": lambda url: upload(__file__, url),
    "download": lambda url: download(url, "/dev/null"),
    "list_files": list_files,
    "read_range": lambda url: read_range(url, 0, 10),
    "delete_folder": delete_folder,
    "delete_file": delete_file,
    "rename_folder": lambda url: rename_folder(url, f"{url} 2"),
}


@pytest.mark.parametrize(("path", "url"), [("gs://b/x", True), ("/a/b", False), ("a:b", False), ("~/gs:/x", False)])
def test_a_url_is_recognized_by_its_scheme(path, url):
    assert is_url(path) is url


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("gs://b/x", "y", "z.json"), "gs://b/x/y/z.json"),
        (("gs://b/x/", "y"), "gs://b/x/y"),
        (("gs://b/~/x", "y"), "gs://b/~/x/y"),
        (("a/", "b", "c"), "a/b/c"),
        (("/a", "b"), "/a/b"),
        (("~/a", "b"), "/home/me/a/b"),
    ],
)
def test_join_of_paths_and_of_urls(parts, joined, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert join(*parts) == joined


@pytest.mark.parametrize("content", CONTENTS, ids=len)
def test_written_bytes_read_back_equal(files, content):
    for name in ("a", "new"):
        write_bytes(join(files, name), content)
        fs, inside = open_fs(join(files, name))
        assert fs.cat_file(inside) == content
        assert read_bytes(join(files, name)) == content
        assert file_size(join(files, name)) == len(content)
        assert read_range(join(files, name), 2, 5) == content[2:5]
    assert list_names(files) == ["a", "b", "c", "new"]


def test_names_are_listed_in_a_folder_and_sizes_below_it(files, tmp_path):
    assert list_names(files) == list_names(files + "/") == ["a", "b", "c"]
    assert (list_names(join(files, "c")), list_names(join(files, "none"))) == (["d"], [])
    assert list(list_files(files).items()) == list(list_files(files + "/").items()) == [("a", 1), ("b", 2), ("c/d", 0)]
    assert (list_files(join(files, "c")), list_files(join(files, "none"))) == ({"d": 0}, {})
    assert [file_size(join(files, name)) for name in ("a", "b", "c/d", "none", "none/a")] == [1, 2, 0, None, None]
    assert file_size(str(tmp_path)) is None


def test_json_reads_back_equal_and_is_sorted(files):
    path, value = join(files, "a"), {"b": [1, 2.5], "a": {"ü": True}}
    write_json(path, value)
    assert read_json(path) == value
    assert list(read_json(path)) == ["a", "b"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00"])
def test_invalid_json_is_a_value_error_but_not_a_user_error(files, content):
    write_bytes(join(files, "a"), content)
    with pytest.raises(ValueError, match=r".") as caught:
        read_json(join(files, "a"))
    assert not isinstance(caught.value, UserError)


@pytest.mark.parametrize("name", ["read_bytes", "read_json", "download", "read_range"])
def test_a_missing_file_raises_file_not_found(files, name):
    with pytest.raises(FileNotFoundError):
        DO[name](join(files, "none"))


@pytest.mark.parametrize("content", CONTENTS, ids=len)
def test_upload_and_download_keep_the_content(files, tmp_path, content):
    (tmp_path / "local").write_bytes(content)
    upload(str(tmp_path / "local"), join(files, "b"))
    assert read_bytes(join(files, "b")) == content
    (tmp_path / "copy").write_bytes(b"of before")
    download(join(files, "b"), str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == content
    if content:
        with pytest.raises(OSError, match="No space left"):
            download(join(files, "b"), "/dev/full")


@pytest.mark.parametrize(("reads", "expected"), [("v", "v"), ("abv", "v"), ("aba", "a"), ("abcdefgh", None)])
def test_invalid_content_counts_only_if_two_reads_return_it(reads, expected, caplog):
    left = iter(reads)
    if expected is None:
        with pytest.raises(UserError, match=r"^a/file: cannot be read reliably: 8 reads"):
            read_reliably("a/file", lambda: next(left), "v".__eq__)
    else:
        assert read_reliably("a/file", lambda: next(left), "v".__eq__) == expected
    assert list(left) == []
    assert caplog.text.count("a/file: invalid content, reading it again") == len(reads) - (expected is not None)


def test_deleting_deletes_what_is_named_and_twice_is_not_an_error(files):
    for _ in range(2):
        delete_file(join(files, "a"))
        assert list_files(files) == {"b": 2, "c/d": 0}
    delete_file(join(files, "none", "a"))
    write_bytes(join(files, "c2"), b"")  # has the folder's name as prefix
    for _ in range(2):
        delete_folder(join(files, "c"))
        assert list_names(files) == ["b", "c2"]
    delete_folder(files)
    assert list_files(files) == {}
    assert list_names(files) == []


def test_a_url_that_is_not_writable_is_an_error_and_else_no_file_is_left(tmp_path, broken):
    url = f"memory://{tmp_path}"
    write_bytes(join(url, "a"), b"1")
    check_writable(url)
    assert list_names(url) == ["a"]
    with pytest.raises(UserError, match=f"^{broken}/.writable: cannot be written: the reason$"):
        check_writable(broken)


def test_renaming_a_folder_moves_everything_below_it(files):
    write_bytes(join(files, "c", "e"), b"4444")
    write_bytes(join(files, "c2"), b"")
    rename_folder(join(files, "c"), join(files, "new"))
    assert list_files(files) == {"a": 1, "b": 2, "c2": 0, "new/d": 0, "new/e": 4}
    assert list_names(files) == ["a", "b", "c2", "new"]
    assert read_bytes(join(files, "new", "e")) == b"4444"


@pytest.mark.parametrize("name", DO)
def test_errors_of_a_file_system_and_an_unknown_scheme_become_a_user_error_with_the_url(broken, name):
    for url, reason in ((broken, "the reason"), ("nothing://a/b", "nothing")):
        with pytest.raises(UserError, match=rf"^{url}: .*{reason}$"):
            DO[name](url)
