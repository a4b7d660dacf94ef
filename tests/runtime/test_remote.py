"""Errors of remote file systems, as messages for the user."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler

import aiohttp
import pytest
from botocore.exceptions import EndpointConnectionError
from web import serving

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.remote import read_small, remote_errors

BUSY = "the server is overloaded or unavailable"
NO_CONNECTION = "the server does not answer or its connections break"
NO_ANSWER = f"Cannot connect to host b:443 ssl:default [Connection refused]\n  {NO_CONNECTION}"


def from_server(status: int | None) -> Exception:
    """What fsspec raises for an answer with this status; None: no answer."""
    error = FileNotFoundError("https://b/x")
    error.__cause__ = aiohttp.ClientResponseError(None, (), status=status or 0)
    if status is None:
        key = aiohttp.client_reqrep.ConnectionKey("b", 443, True, True, None, None, None)
        error.__cause__ = aiohttp.ClientConnectorError(key, OSError(111, "Connection refused"))
    return error


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (
            "gs://b/x",
            RuntimeError("Forbidden"),
            "Forbidden\n  for private buckets run `gcloud auth application-default",
        ),
        ("s3://b/x", RuntimeError("Forbidden\nmore"), "Forbidden\n  for private buckets set AWS_ACCESS_KEY_ID"),
        ("https://b/x", RuntimeError("Forbidden"), "Forbidden"),
        ("https://b/x", TimeoutError(), f"TimeoutError\n  {NO_CONNECTION}"),
        ("gs://b/x", ConnectionResetError(104, "Reset"), f"[Errno 104] Reset\n  {NO_CONNECTION}"),
        (
            "s3://b/x",
            EndpointConnectionError(endpoint_url="U"),
            f'Could not connect to the endpoint URL: "U"\n  {NO_CONNECTION}',
        ),
        ("gs://b/x", FileNotFoundError(), "no such file or bucket"),
        ("a/b", FileNotFoundError(), "no such file or bucket"),
        ("https://b/x", from_server(404), "no such file or bucket"),
        ("https://b/x", from_server(403), "HTTP 403 Forbidden"),
        ("https://b/x", from_server(500), f"HTTP 500 Internal Server Error\n  {BUSY}"),
        ("https://b/x", from_server(None), NO_ANSWER),
        ("a/b", PermissionError(13, "Permission denied"), "[Errno 13] Permission denied"),
    ],
)
def test_errors_are_reported_with_path_reason_and_advice(path, error, message):
    with pytest.raises(UserError) as caught, remote_errors(path, "read"):
        raise error
    assert str(caught.value).startswith(f"{path}: cannot be read: {message}")
    assert len(str(caught.value).splitlines()) == 1 + ("\n" in message or path.startswith(("gs:", "s3:")))


@pytest.mark.parametrize(
    ("path", "error", "missing_too"),
    [
        ("a/b", KeyError("a mistake of ours"), True),
        ("gs://b/x", UserError("already"), True),
        ("a/b", FileNotFoundError(), False),
        ("gs://b/x", FileNotFoundError(), False),
    ],
)
def test_other_errors_pass_unchanged(path, error, missing_too):
    with pytest.raises(type(error)) as caught, remote_errors(path, "read", missing_too):
        raise error
    assert caught.value is error


@pytest.fixture
def server():
    """The address of a server whose answers are small, compressed, endless, or none."""
    stopped = threading.Event()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
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

        def log_message(self, *_):
            pass

    with serving(Answers) as address:
        yield f"http://{address}"
        stopped.set()


@pytest.mark.parametrize(("name", "content"), [("small", b"a: 1\n"), ("compressed", None), ("endless", None)])
def test_a_small_file_is_read_and_a_large_one_is_not(server, name, content):
    assert read_small(f"{server}/{name}", 10_000) == content


def test_a_server_without_an_answer_is_an_error(server):
    message = r"/nothing: cannot be read: .*\n  the server does not answer"
    with pytest.raises(UserError, match=message), remote_errors("http://host/nothing", "read"):
        read_small(f"{server}/nothing", 10_000, seconds=0.2)
    with pytest.raises(FileNotFoundError):
        read_small(f"{server}/missing", 10_000)


def test_a_large_file_in_a_store_is_not_read():
    import fsspec

    fsspec.filesystem("memory").pipe_file("/read_small.yaml", b"a: 1\n")
    assert [read_small("memory://read_small.yaml", limit) for limit in (4, 5)] == [None, b"a: 1\n"]
