"""Retries of requests to object stores and web servers that are throttled or interrupted.

gcsfs waits at least a second before each of its 5 retries, which makes a save of hundreds of small requests slow, and
fsspec never retries a request to a web server. So a request is first repeated here, after a fraction of a second. That
takes up to 3 seconds, after which the library gets the failure. Botocore repeats the requests of s3:// in such a way,
without a message.
"""

import asyncio
import logging
import random
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lmtrain.runtime.remote import BUSY_STATUSES

_RETRIES, _FIRST_SECONDS = 4, 0.1
_SECONDS_BETWEEN_MESSAGES = 30.0

_log = logging.getLogger("lmtrain")
_next_message = 0.0


async def retry_soon(request: aiohttp.ClientRequest, handler: Any) -> aiohttp.ClientResponse:
    """Middleware of aiohttp: repeats a request with exponential backoff and jitter, and logs why."""
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


async def retry_google(request: aiohttp.ClientRequest, handler: Any) -> aiohttp.ClientResponse:
    """`retry_soon`, which also repeats a truncated answer, but not the content of a file: gcsfs may stream that."""

    async def read(sent: aiohttp.ClientRequest) -> aiohttp.ClientResponse:
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
        _log.warning(f"{host}: {reason}; retrying")
