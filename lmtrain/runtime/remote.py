"""Remote files through fsspec, with errors that say what to do. fsspec is imported only when a URL is used."""

import functools
import http.client
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import find_secrets, without

_ADVICE = {
    "gs": "for private buckets run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "for private buckets set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for "
    "stores that are not Amazon's",
}

# Of a store or server that is throttled or out of order: requests with these answers are repeated.
BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
_BUSY = "the server is overloaded or unavailable: repeated requests failed too"

# Names of exceptions of aiohttp, botocore, requests and Python for connections that fail, with their subclasses.
_CONNECTION_ERRORS = {
    *("ClientConnectionError", "ClientPayloadError"),
    *("ConnectionError", "HTTPClientError", "IncompleteReadError"),
    *("Timeout", "TimeoutError"),
}
_NO_CONNECTION = (
    "the server does not answer or its connections break: repeated requests failed too; check the network and the "
    "address of the server, then run the same command again"
)

# gcsfs logs a traceback for every exception, and a warning for every request to a bucket without read permission.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def open_fs(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path, and the path within it. Raises `UserError` for an unknown protocol."""
    import fsspec

    if "://" in path:
        _set_defaults(path.partition("://")[0])
    try:
        fs, inside = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: {error}") from None
    fs.invalidate_cache()  # listings: other processes write too, and files missing from a cached listing are not found
    return fs, inside


def read_small(url: str, limit: int, seconds: float = 60.0) -> bytes | None:
    """Content of a file of at most `limit` bytes; None if it is larger. Call it within `remote_errors`.

    A web server may send more than it says, compressed, or nothing at all: so reading ends at the limit, and after
    `seconds` with TimeoutError.
    """
    fs, inside = open_fs(url)
    if not url.startswith(("http://", "https://")):
        content: bytes | None = fs.cat_file(inside) if fs.info(inside)["size"] <= limit else None
        return content
    import aiohttp

    read = b""
    try:
        timeout = aiohttp.ClientTimeout(total=seconds)
        with fs.open(
            inside, "rb", block_size=0, size=1, timeout=timeout
        ) as file:  # a stream, without asking for the size
            while len(read) <= limit and (part := file.read(limit + 1 - len(read))):
                read += part
    except TimeoutError:
        raise TimeoutError(f"the server did not send all of it within {seconds:.0f} s") from None
    return read if len(read) <= limit else None


@functools.cache
def _set_defaults(scheme: str) -> None:
    """Set timeouts, in seconds, where the libraries have none or wait for minutes; and retries.

    In fsspec's own configuration, so that they also hold for file systems that Orbax opens. Settings of the user's
    fsspec configuration take precedence.
    """
    import fsspec

    name = {"gcs": "gs", "https": "http"}.get(scheme, scheme)
    defaults: dict[str, Any] = {}
    if name == "gs":
        import aiohttp

        from lmtrain.runtime.retries import retry_google

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
        defaults = {"requests_timeout": timeout, "session_kwargs": {"middlewares": (retry_google,)}}
    elif name == "http":
        from lmtrain.runtime.retries import retry_soon

        defaults = {"client_kwargs": {"middlewares": (retry_soon,)}}
    elif name == "s3":
        from lmtrain.runtime.retries import prepare_s3

        # "standard" does not repeat HEAD requests that are answered with 429. Waits up to 1, 2, 4, ... s, at random
        retries = {"max_attempts": 5, "mode": "legacy"}
        session = prepare_s3()
        config = {"connect_timeout": 10, "read_timeout": 60, "retries": retries, "http_session_cls": session}
        defaults = {"config_kwargs": config}
    fsspec.config.conf[name] = {**defaults, **fsspec.config.conf.get(name, {})}


def is_missing(error: BaseException) -> bool:
    """Whether a file is missing. Over HTTP fsspec raises FileNotFoundError for all failures, with the real cause."""
    cause = error.__cause__
    over_http = type(cause).__module__.partition(".")[0] == "aiohttp"
    return isinstance(error, FileNotFoundError) and (not over_http or getattr(cause, "status", None) == 404)


def without_query(url: str) -> str:
    """A URL of a web server without its query, such as a signature; others unchanged, as `?` is a glob in them."""
    return url.partition("?")[0].partition("#")[0] if url.startswith(("http://", "https://")) else url


@contextmanager
def remote_errors(path: str, doing: str, missing_too: bool = True) -> Iterator[None]:
    """Convert exceptions of a remote file system to a `UserError` that names the path.

    Without `missing_too`, FileNotFoundError passes unchanged. All exceptions are caught, because each library has its
    own types and some raise plain ones.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        missing = is_missing(error)
        if (missing and not missing_too) or ("://" not in path and not isinstance(error, OSError)):
            raise
        status, reason = (None, "no such file or bucket") if missing else _reason(error)
        reason = without(reason, find_secrets(path))  # such as KEY:SECRET@bucket, which s3fs takes for a bucket
        advice = _BUSY if status in BUSY_STATUSES else _ADVICE.get(path.partition("://")[0])
        if status is None and _is_connection_error(error):
            advice = _NO_CONNECTION
        raise UserError(f"{path}: cannot be {doing}: {reason}" + (f"\n  {advice}" if advice else "")) from None


def _is_connection_error(error: Exception) -> bool:
    """Whether a connection failed, rather than a request on it."""
    failures = [failure for failure in (error, error.__cause__) if failure is not None]
    return any(kind.__name__ in _CONNECTION_ERRORS for failure in failures for kind in type(failure).__mro__)


def _reason(error: Exception) -> tuple[int | None, str]:
    """HTTP status of a failed request, if any, and a line of text that has it. Without URLs, which may have secrets."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else None
    for failure in (error, cause):
        response = getattr(failure, "response", None)  # of botocore
        if isinstance(response, dict) and "ResponseMetadata" in response:
            return _describe(response["ResponseMetadata"].get("HTTPStatusCode"), response["Error"].get("Message"))
        if isinstance(status := getattr(failure, "status", None), int):  # of aiohttp
            return _describe(status, getattr(failure, "message", ""))
        if type(failure).__module__ == "gcsfs.retry" and (status := getattr(failure, "code", None)):
            return _describe(status, str(failure).removesuffix(f", {status}"))
    first, _, rest = str(error).strip().partition("\n")
    if first.startswith("Forbidden: "):  # of gcsfs, followed by the URL
        return _describe(403, rest)
    if type(error).__name__ == "ProxyError":  # of gcsfs, without text
        return _describe(502, "")
    if isinstance(error, FileNotFoundError) and cause is not None:
        first = str(cause).strip().partition("\n")[0] or type(cause).__name__
    return None, first or type(error).__name__


def _describe(status: int | None, text: str | bytes | None) -> tuple[int | None, str]:
    """A status with its standard text, and the first line of the server's own, without HTML."""
    own = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    own = " ".join(re.sub(r"<[^>]*>", " ", own.strip().partition("\n")[0]).split())
    if not str(status).isdigit():
        return None, own or "the server gave no reason"
    code = int(status or 0)
    name = f"HTTP {code} {http.client.responses.get(code, '')}".strip()
    return code, name if not own or name.endswith(own) else f"{name}: {own}"
