"""Errors of remote file systems, as messages for the user."""

import gzip
import threading

import aiohttp
import fsspec
import pytest
from botocore.exceptions import EndpointConnectionError
from web import QuietFiles, serving

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.remote import read_small, remote_errors


def from_server(status: int | None) -> Exception:
    """What fsspec raises for an answer with this status; None: no answer."""
    error = FileNotFoundError("https://b/x")
    error.__cause__ = aiohttp.ClientResponseError(None, (), status=status or 0)
    if status is None:
        key = aiohttp.client_reqrep.ConnectionKey("b", 443, True, True, None, None, None)
        error.__cause__ = aiohttp.ClientConnectorError(key, OSError(111, "Connection refused"))
    return error


@pytest.mark.parametrize(
    ("path", "error", "parts", "lines"),
    [
        ("gs://b/x", RuntimeError("Forbidden"), ["Forbidden", "gcloud auth application-default"], 2),
        ("s3://b/x", RuntimeError("Forbidden\nmore"), ["Forbidden", "AWS_ACCESS_KEY_ID"], 2),
        ("https://b/x", TimeoutError(), ["TimeoutError"], 2),
        ("gs://b/x", ConnectionResetError(104, "Reset"), ["Reset"], 2),
        ("s3://b/x", EndpointConnectionError(endpoint_url="U"), ['"U"'], 2),
        ("a/b", FileNotFoundError(), ["no such file"], 1),
        ("https://b/x", from_server(404), ["no such file"], 1),
        ("https://b/x", from_server(403), ["HTTP 403 Forbidden"], 1),
        ("https://b/x", from_server(500), ["HTTP 500 Internal Server Error"], 2),
        ("https://b/x", from_server(None), ["Connection refused"], 2),
    ],
)
def test_errors_are_reported_with_path_reason_and_advice(path, error, parts, lines):
    with pytest.raises(UserError) as caught, remote_errors(path, "read"):
        raise error
    assert str(caught.value).startswith(f"{path}: cannot be read: {parts[0]}" if lines == 1 else f"{path}: ")
    assert [part for part in parts if part not in str(caught.value)] == []
    assert len(str(caught.value).splitlines()) == lines


@pytest.mark.parametrize(
    ("path", "error"),
    [("a/b", KeyError("ours")), ("gs://b/x", UserError("already")), ("gs://b/x", FileNotFoundError())],
)
def test_other_errors_pass_unchanged(path, error):
    with pytest.raises(type(error)) as caught, remote_errors(path, "read", missing_too=False):
        raise error
    assert caught.value is error


@pytest.fixture
def server():
    """The address of a server whose answers are small, compressed, endless, or none."""
    stopped = threading.Event()

    class Answers(QuietFiles):
        def do_GET(self):  # noqa: N802
            if self.path == "/nothing":
                stopped.wait(60)
                return
            self.send_response(404 if self.path == "/missing" else 200)
            content = b"a: 1\n" * (1 if self.path == "/small" else 100_000)
            if self.path == "/compressed":
                content = gzip.compress(content)
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            while not stopped.is_set():
                try:
                    self.wfile.write(content)
                except OSError:  # the client has read enough
                    return
                if self.path != "/endless":
                    return

    with serving(Answers) as address:
        yield f"http://{address}"
        stopped.set()


def test_a_small_file_is_read_and_a_large_one_is_not(server):
    found = [read_small(f"{server}/{name}", 10_000) for name in ("small", "compressed", "endless")]
    assert found == [b"a: 1\n", None, None]
    fsspec.filesystem("memory").pipe_file("/read_small.yaml", b"a: 1\n")
    assert [read_small("memory://read_small.yaml", limit) for limit in (4, 5)] == [None, b"a: 1\n"]


def test_a_server_without_an_answer_is_an_error(server):
    with pytest.raises(UserError, match="/nothing: "), remote_errors("http://host/nothing", "read"):
        read_small(f"{server}/nothing", 10_000, seconds=0.2)
    with pytest.raises(FileNotFoundError):
        read_small(f"{server}/missing", 10_000)
