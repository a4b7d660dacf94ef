"""File operations for paths and URLs; errors name the path."""

import fsspec
import pytest

from lmtrain.config.errors import UserError
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
    read_blocks,
    read_bytes,
    read_json,
    rename_folder,
    told,
    upload,
    write_bytes,
    write_json,
)

CONTENTS = [b"", b"\x00\xff", b"x" * 5_000_000]


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
    "read_blocks": lambda url: list(read_blocks(url, 10)),
    "delete_folder": delete_folder,
    "delete_file": delete_file,
    "rename_folder": lambda url: rename_folder(url, f"{url} 2"),
}
DOING = {
    "write_bytes": "written",
    "write_json": "written",
    "upload": "written",
    "list_names": "listed",
    "list_files": "listed",
    "delete_folder": "deleted",
    "delete_file": "deleted",
    "rename_folder": "renamed",
}


@pytest.mark.parametrize(
    ("path", "url"), [("gs://b/x", True), ("memory://", True), ("/a/b", False), ("a:b", False), ("~/gs:/x", False)]
)
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


def test_open_fs_selects_the_file_system_by_scheme(tmp_path):
    fs, inside = open_fs("memory://a/b")
    assert (fs.protocol, inside) == ("memory", "/a/b")
    fs, inside = open_fs(str(tmp_path))
    assert ("file" in fs.protocol, inside) == (True, str(tmp_path))


@pytest.mark.parametrize("name", DO)
def test_an_unknown_url_scheme_is_a_user_error(name):
    with pytest.raises(UserError, match=r"^nothing://a/b: Protocol not known: nothing$"):
        DO[name]("nothing://a/b")


@pytest.mark.parametrize("content", CONTENTS, ids=len)
def test_written_bytes_read_back_equal(files, content):
    for name in ("a", "new"):
        write_bytes(join(files, name), content)
        fs, inside = open_fs(join(files, name))
        assert fs.cat_file(inside) == content
        assert read_bytes(join(files, name)) == content
        assert file_size(join(files, name)) == len(content)
    assert list_names(files) == ["a", "b", "c", "new"]


def test_a_url_needs_no_folder_before_its_file(tmp_path):
    url = f"memory://{tmp_path}/one/two/three"
    write_bytes(url, b"1")
    assert read_bytes(url) == b"1"


@pytest.mark.parametrize("value", [None, "ü\n☃", {"b": [1, 2.5], "a": {"ü": True}}])
def test_json_reads_back_equal_and_is_sorted(files, value):
    path = join(files, "a")
    write_json(path, value)
    assert read_json(path) == value
    if isinstance(value, dict):
        text = '{\n  "a": {\n    "ü": true\n  },\n  "b": [\n    1,\n    2.5\n  ]\n}\n'
        assert read_bytes(path) == text.encode()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00"])
def test_invalid_json_is_a_value_error_but_not_a_user_error(files, content):
    write_bytes(join(files, "a"), content)
    with pytest.raises(ValueError, match=r".") as caught:
        read_json(join(files, "a"))
    assert not isinstance(caught.value, UserError)


def test_listed_names_are_sorted_and_not_recursive(files):
    assert list_names(files) == ["a", "b", "c"]
    assert list_names(join(files, "c")) == ["d"]
    assert list_names(files + "/") == ["a", "b", "c"]


def test_listed_names_are_sorted_if_the_file_system_does_not_sort(broken, monkeypatch):
    monkeypatch.setattr(_Broken, "ls", lambda *arguments, detail: ["folder/b/", "folder/a"])
    assert list_names("broken://folder") == ["a", "b"]


def test_a_missing_folder_has_no_names(files):
    assert list_names(join(files, "none")) == []


def test_the_size_of_a_file_or_none_if_missing(files):
    assert [file_size(join(files, name)) for name in ("a", "b", "c/d", "none", "none/a")] == [1, 2, 0, None, None]


def test_a_local_folder_has_no_file_size(tmp_path):
    assert file_size(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["read_bytes", "read_json", "download", "read_blocks"])
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


@pytest.mark.parametrize(("content", "size"), [(b"", 3), (b"12", 3), (b"123", 3), (b"1234567", 3), (b"1" * 6, 3)])
def test_blocks_cover_the_content_and_all_but_the_last_are_full(files, content, size):
    write_bytes(join(files, "a"), content)
    blocks = list(read_blocks(join(files, "a"), size))
    assert b"".join(blocks) == content
    assert [len(block) for block in blocks[:-1]] == [size] * (len(blocks) - 1)
    assert len(blocks) == -(-len(content) // size)


def test_all_files_below_a_folder_are_listed_with_their_sizes(files):
    assert list_files(files) == list_files(files + "/") == {"a": 1, "b": 2, "c/d": 0}
    assert list(list_files(files)) == ["a", "b", "c/d"]
    assert list_files(join(files, "c")) == {"d": 0}
    assert list_files(join(files, "none")) == {}


def test_deleting_a_folder_deletes_everything_below_it_and_nothing_else(files):
    write_bytes(join(files, "c2"), b"")  # has the folder's name as prefix
    delete_folder(join(files, "c"))
    assert list_names(files) == ["a", "b", "c2"]
    delete_folder(join(files, "c"))  # twice is no error
    delete_folder(files)
    assert list_files(files) == {}
    assert list_names(files) == []


def test_deleting_a_file_twice_is_not_an_error(files):
    for _ in range(2):
        delete_file(join(files, "a"))
        assert list_files(files) == {"b": 2, "c/d": 0}
    delete_file(join(files, "none", "a"))


def test_renaming_a_folder_moves_everything_below_it(files):
    write_bytes(join(files, "c", "e"), b"4444")
    write_bytes(join(files, "c2"), b"")
    rename_folder(join(files, "c"), join(files, "new"))
    assert list_files(files) == {"a": 1, "b": 2, "c2": 0, "new/d": 0, "new/e": 4}
    assert list_names(files) == ["a", "b", "c2", "new"]
    assert read_bytes(join(files, "new", "e")) == b"4444"


def test_check_writable_leaves_no_files(tmp_path):
    url = f"memory://{tmp_path}"
    write_bytes(join(url, "a"), b"1")
    check_writable(url)
    assert list_names(url) == ["a"]


def test_check_writable_raises_for_a_url_that_is_not_writable(broken):
    with pytest.raises(UserError, match=f"^{broken}/.writable: cannot be written: the reason$"):
        check_writable(broken)


def test_a_download_of_a_missing_file_leaves_no_file(files, tmp_path):
    with pytest.raises(FileNotFoundError):
        download(join(files, "none"), str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_a_full_disk_during_a_download_is_an_os_error(files):
    with pytest.raises(OSError, match="No space left"):
        download(join(files, "b"), "/dev/full")


@pytest.mark.parametrize("name", DO)
def test_errors_of_a_file_system_become_a_user_error_with_the_url(broken, name):
    with pytest.raises(UserError) as caught:
        DO[name](broken)
    assert str(caught.value) == f"{broken}: cannot be {DOING.get(name, 'read')}: the reason"


def test_a_failure_during_a_download_is_a_user_error(broken, monkeypatch, tmp_path):
    class Half:
        def read(self, size):
            raise _Broken.error

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(_Broken, "open", lambda *arguments: Half())
    with pytest.raises(UserError, match=f"^{broken}: cannot be read: the reason$"):
        download(broken, str(tmp_path / "copy"))


def test_an_error_without_message_is_reported_by_its_class_name(broken, monkeypatch):
    monkeypatch.setattr(_Broken, "error", TimeoutError())
    with pytest.raises(UserError, match=r"cannot be read: TimeoutError$"):
        read_bytes(broken)


@pytest.mark.parametrize("name", ["write_bytes", "write_json", "upload"])
def test_a_write_to_a_missing_bucket_is_a_user_error(broken, monkeypatch, name):
    monkeypatch.setattr(_Broken, "error", FileNotFoundError("https://storage.example/upload/b/o"))
    with pytest.raises(UserError, match=f"^{broken}: cannot be written: no such file or bucket$"):
        DO[name](broken)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("gs://b/x", "gcloud auth application-default login"),
        ("s3://b/x", "AWS_ACCESS_KEY_ID"),
        ("https://b/x", None),
    ],
)
def test_errors_include_advice_on_credentials(url, advice):
    with pytest.raises(UserError) as caught, told(url, "read"):
        raise RuntimeError("Forbidden")
    first, *more = str(caught.value).splitlines()
    assert first == f"{url}: cannot be read: Forbidden"
    assert (advice in more[0]) if advice else not more


def test_at_a_path_only_os_errors_become_user_errors():
    with pytest.raises(UserError, match=r"^a/b: cannot be read: .*Permission denied"), told("a/b", "read"):
        raise PermissionError(13, "Permission denied")
    with pytest.raises(KeyError), told("a/b", "read"):
        raise KeyError("a mistake of ours")


@pytest.mark.parametrize("path", ["a/b", "gs://b/x"])
def test_a_user_error_passes_unchanged(path):
    with pytest.raises(UserError, match=r"^already$"), told(path, "read"):
        raise UserError("already")


@pytest.mark.parametrize("path", ["a/b", "gs://b/x"])
def test_a_missing_file_is_a_user_error_unless_missing_too_is_false(path):
    with pytest.raises(UserError, match=f"^{path}: cannot be read: no such file or bucket"), told(path, "read"):
        raise FileNotFoundError
    with pytest.raises(FileNotFoundError), told(path, "read", missing_too=False):
        raise FileNotFoundError
