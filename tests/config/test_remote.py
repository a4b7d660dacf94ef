"""Errors of remote file systems, as messages for the user."""

import aiohttp
import pytest
from botocore.exceptions import EndpointConnectionError

from lmtrain.config.errors import UserError
from lmtrain.config.remote import remote_errors

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
