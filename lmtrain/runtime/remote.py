"""Remote files through fsspec, with errors that say what to do. fsspec is imported only when a URL is used."""

import functools
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import find_secrets, without

if TYPE_CHECKING:
    import aiohttp

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

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
        defaults = {"requests_timeout": timeout, "session_kwargs": {"middlewares": (retry_google,)}}
    elif name == "http":
        defaults = {"client_kwargs": {"middlewares": (retry_soon,)}}
    elif name == "s3":
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
    import http.client  # slow, with ssl

    own = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    own = " ".join(re.sub(r"<[^>]*>", " ", own.strip().partition("\n")[0]).split())
    if not str(status).isdigit():
        return None, own or "the server gave no reason"
    code = int(status or 0)
    name = f"HTTP {code} {http.client.responses.get(code, '')}".strip()
    return code, name if not own or name.endswith(own) else f"{name}: {own}"


# Retries of requests to object stores and web servers that are throttled or interrupted.
#
# gcsfs waits at least a second before each of its 5 retries, which makes a save of hundreds of small requests slow, and
# fsspec never retries a request to a web server. So a request is first repeated here, after a fraction of a second.
# That takes up to 3 seconds, after which the library gets the failure. Botocore repeats the requests of s3:// in such a
# way, without a message.

_RETRIES, _FIRST_SECONDS = 4, 0.1
_SECONDS_BETWEEN_MESSAGES = 30.0

_next_message = 0.0


async def retry_soon(request: "aiohttp.ClientRequest", handler: Any) -> "aiohttp.ClientResponse":
    """Middleware of aiohttp: repeats a request with exponential backoff and jitter, and logs why."""
    import asyncio  # these are slow to import
    import random

    import aiohttp

    for attempt in range(_RETRIES):
        try:
            response: aiohttp.ClientResponse = await handler(request)
        except aiohttp.ClientConnectorError:  # unreachable: repeating would delay the message
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError) as error:
            reason = str(error) or type(error).__name__
        else:
            if response.status not in BUSY_STATUSES:
                return response
            reason = f"HTTP {response.status} {response.reason or ''}".strip()
            response.release()
        _report(request.url.host or "", reason)
        await asyncio.sleep(_FIRST_SECONDS * 2**attempt * random.uniform(1.0, 2.0))
    last: aiohttp.ClientResponse = await handler(request)
    return last


async def retry_google(request: "aiohttp.ClientRequest", handler: Any) -> "aiohttp.ClientResponse":
    """`retry_soon`, which also repeats a truncated answer, but not the content of a file: gcsfs may stream that."""

    async def read(sent: "aiohttp.ClientRequest") -> "aiohttp.ClientResponse":
        response: aiohttp.ClientResponse = await handler(sent)
        if sent.url.query.get("alt") != "media":
            await response.read()
        return response

    return await retry_soon(request, read)


def prepare_s3() -> type:
    """Let s3fs repeat reads with a checksum mismatch too. Returns a class of sessions that log each failed request."""
    import s3fs
    from aiobotocore.httpsession import AIOHTTPSession
    from botocore.exceptions import FlexibleChecksumError

    s3fs.core.add_retryable_error(FlexibleChecksumError)

    async def send(session: Any, request: Any) -> Any:
        response = await AIOHTTPSession.send(session, request)
        if response.status_code in BUSY_STATUSES:
            _report(urlsplit(request.url).hostname or "", f"HTTP {response.status_code}")
        return response

    return type("ReportingSession", (AIOHTTPSession,), {"send": send})


def _report(host: str, reason: str) -> None:
    """Log a retry, but not each of thousands."""
    global _next_message
    if time.monotonic() >= _next_message:
        _next_message = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
        logging.getLogger("lmtrain").warning(f"{host}: {reason}; retrying")
