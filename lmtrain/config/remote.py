"""Files that fsspec opens, and errors of theirs that say what to do. fsspec is imported when a URL is at hand."""

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

# It logs the traceback of whatever it raises, and a warning with every request where it may not look at a bucket.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def open_fs(path: str) -> tuple[Any, str]:
    """fsspec's file system of a path, and the path within it. Raises `UserError` if there is no such kind."""
    import fsspec

    try:
        fs, inside = fsspec.core.url_to_fs(path, **_timeouts(path.partition("://")[0]))
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: {error}") from None
    fs.invalidate_cache()  # of listings: other processes write too, and what a listing lacks is not looked for
    return fs, inside


def _timeouts(scheme: str) -> dict[str, Any]:
    """Limits where the libraries have none, or wait for minutes; in seconds."""
    if scheme in ("gs", "gcs"):
        import aiohttp

        return {"requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)}
    if scheme == "s3":
        return {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}}
    return {}


def is_missing(error: BaseException) -> bool:
    """Whether a file is not there. Over HTTP fsspec calls every failure a missing file, with the real one as cause."""
    cause = error.__cause__
    over_http = type(cause).__module__.partition(".")[0] == "aiohttp"
    return isinstance(error, FileNotFoundError) and (not over_http or getattr(cause, "status", None) == 404)


@contextmanager
def told(path: str, doing: str, missing_too: bool = True) -> Iterator[None]:
    """Turns what a remote file system raises into a `UserError` that names the path; without `missing_too` a missing
    file stays an error of its own. Each library has its own kinds of error, and some raise bare ones, so all are
    caught."""
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
