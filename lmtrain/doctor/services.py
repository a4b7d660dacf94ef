"""What is not on this machine: places that are read and written, W&B, the Hugging Face hub. No token is ever shown."""

import os
import re
import shutil
import time
import urllib.request
import uuid
from collections.abc import Iterator

from lmtrain.config.errors import UserError
from lmtrain.doctor.finding import Finding, State
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.storage import (
    delete_file,
    file_size,
    is_url,
    join,
    list_names,
    read_blocks,
    read_bytes,
    write_bytes,
)
from lmtrain.tracking.wandb import HOSTS as WANDB_HOSTS
from lmtrain.tracking.wandb import has_key

_SECONDS = 5.0
_PROBE_BYTES = 1 << 20


def look_at_place(place: str) -> Finding:
    """Of a file the beginning is read; a folder or bucket is written to, listed, read back and cleaned.

    A folder that is not there yet is not made: the one above it is tried.
    """
    began = time.monotonic()
    place = place if is_url(place) else os.path.expanduser(place)
    try:
        size = file_size(place)
        if size is not None:
            next(read_blocks(place, _PROBE_BYTES), b"")
            return Finding("storage", f"{place}: a file of {format_bytes(size)}, can be read{_after(began)}")
        if _names_files(place):
            return Finding("storage", f"{place}: no such file", State.BAD, "a folder or a bucket is tried by its name")
        folder = place if is_url(place) else _nearest_folder(place)
        if not _keeps(folder):
            advice = "this store is not safe for checkpoints"
            return Finding("storage", f"{folder}: what was written is not what is read", State.BAD, advice)
    except UserError as error:
        text, _, advice = str(error).partition("\n")
        return Finding("storage", text, State.BAD, advice.strip())
    except OSError as error:
        advice = "the user that runs lmtrain has to be able to write there"
        return Finding("storage", f"{place}: {error.strerror or error}", State.BAD, advice)
    missing = "" if folder == place else f"not there yet, can be made; {folder}: "
    room = "" if is_url(place) else f", {format_bytes(shutil.disk_usage(folder).free)} free"
    return Finding("storage", f"{place}: {missing}written, listed, read and deleted{_after(began)}{room}")


def _keeps(folder: str) -> bool:
    """Whether what is written to a folder can be found and read there."""
    name, content = f".lmtrain-doctor-{uuid.uuid4().hex}", os.urandom(_PROBE_BYTES)
    probe = join(folder, name)
    write_bytes(probe, content)
    try:
        return name in list_names(folder) and read_bytes(probe) == content
    finally:
        delete_file(probe)


def _names_files(place: str) -> bool:
    """Whether a name is that of files rather than of a folder: by its ending, or its wildcards."""
    name = place.rpartition("/")[2]
    return bool(re.search(r"[*?{\[]", name) or re.search(r"\.(yaml|yml|jsonl?|txt|parquet|gz|zst|bz2|xz)$", name))


def _nearest_folder(place: str) -> str:
    """The folder itself, else the first above it that is there."""
    while not os.path.exists(place):
        place = os.path.dirname(os.path.abspath(place))
    return place


def _after(began: float) -> str:
    return f" in {time.monotonic() - began:.1f} s"


def look_at_services() -> Iterator[Finding]:
    """Keys of trackers and hubs; nothing is sent."""
    yield _wandb()
    yield _hub()


def _wandb() -> Finding:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return Finding("wandb", f"WANDB_MODE is {os.environ['WANDB_MODE']}", State.NOTE)
    if not has_key():
        return Finding(
            "wandb",
            "no API key: runs log offline",
            State.NOTE,
            "`wandb login`, or set WANDB_API_KEY; or take another tracker",
        )
    host = os.environ.get("WANDB_BASE_URL", f"https://{WANDB_HOSTS[0]}")
    reason = _unreachable(host)
    if reason:
        return Finding(
            "wandb",
            f"a key is there, but {host} cannot be reached ({reason}): runs log offline",
            State.NOTE,
            "`wandb sync` sends them later",
        )
    return Finding("wandb", f"a key is there, {host} answers")


def _hub() -> Finding:
    from lmtrain.hf.hub import endpoint, find_token, offline_reason, prepare_hub

    if not prepare_hub():
        return Finding(
            "hub",
            f"offline: {offline_reason()}",
            State.NOTE,
            "models and tokenizers of the hub are used from its cache only",
        )
    if find_token() is None:
        return Finding(
            "hub",
            f"{endpoint()} answers; no token",
            State.NOTE,
            "`hf auth login`, or set HF_TOKEN, for gated models and for uploads",
        )
    return Finding("hub", f"{endpoint()} answers, a token is there")


def _unreachable(url: str) -> str:
    """Why a server does not answer; empty if it does, whatever it says."""
    try:
        urllib.request.urlopen(url, timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""
