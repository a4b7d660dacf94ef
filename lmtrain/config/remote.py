"""Remote files through fsspec, with errors that say what to do. fsspec is imported only when a URL is used."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmtrain.config.errors import UserError

_ADVICE = {
    "gs": "for private buckets run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "for private buckets set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for "
    "stores that are not Amazon's",
}

# gcsfs logs a traceback for every exception, and a warning for every request to a bucket without read permission.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def open_fs(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path, and the path within it. Raises `UserError` for an unknown protocol."""
    import fsspec

    try:
        fs, inside = fsspec.core.url_to_fs(path, **_timeouts(path.partition("://")[0]))
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: {error}") from None
    fs.invalidate_cache()  # listings: other processes write too, and files missing from a cached listing are not found
    return fs, inside


def _timeouts(scheme: str) -> dict[str, Any]:
    """Timeouts in seconds, where the libraries have none or wait for minutes."""
    if scheme in ("gs", "gcs"):
        import aiohttp

        return {"requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)}
    if scheme == "s3":
        return {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}}
    return {}


def is_missing(error: BaseException) -> bool:
    """Whether a file is missing. Over HTTP fsspec raises FileNotFoundError for all failures, with the real cause."""
    cause = error.__cause__
    over_http = type(cause).__module__.partition(".")[0] == "aiohttp"
    return isinstance(error, FileNotFoundError) and (not over_http or getattr(cause, "status", None) == 404)


@contextmanager
def told(path: str, doing: str, missing_too: bool = True) -> Iterator[None]:
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
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        reason = "no such file or bucket" if missing else (str(cause).strip() or type(cause).__name__).splitlines()[0]
        advice = _ADVICE.get(path.partition("://")[0])
        raise UserError(f"{path}: cannot be {doing}: {reason}" + (f"\n  {advice}" if advice else "")) from None
