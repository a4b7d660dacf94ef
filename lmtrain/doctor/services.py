"""What is not on this machine: places that are read and written, W&B, the Hugging Face hub. No token is ever shown."""

import os
import shutil
import time
import urllib.request
import uuid
from collections.abc import Iterator

from lmtrain.config.errors import UserError
from lmtrain.doctor.finding import Finding, State
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.storage import delete_file, file_size, is_url, join, list_names, read_bytes, write_bytes
from lmtrain.tracking.wandb import has_key

_SECONDS = 5.0


def look_at_place(place: str) -> Finding:
    """A file is read; a folder or bucket is written to, listed, read back and cleaned."""
    began = time.monotonic()
    try:
        size = file_size(place)
        if size is not None:
            read_bytes(place)
            return Finding(
                "storage", f"{place}: a file of {format_bytes(size)}, read in {time.monotonic() - began:.1f} s"
            )
        name = f".lmtrain-doctor-{uuid.uuid4().hex}"
        if not is_url(place):
            os.makedirs(os.path.expanduser(place), exist_ok=True)
        content = os.urandom(1 << 20)
        probe = join(place, name)
        write_bytes(probe, content)
        try:
            if name not in list_names(place) or read_bytes(probe) != content:
                return Finding(
                    "storage",
                    f"{place}: what was written is not what is read",
                    State.BAD,
                    "this store is not safe for checkpoints",
                )
        finally:
            delete_file(probe)
    except UserError as error:
        text, _, advice = str(error).partition("\n")
        return Finding("storage", text, State.BAD, advice.strip())
    except OSError as error:
        return Finding(
            "storage",
            f"{place}: {error.strerror or error}",
            State.BAD,
            "the user that runs lmtrain has to be able to write there",
        )
    room = "" if is_url(place) else f", {format_bytes(shutil.disk_usage(os.path.expanduser(place)).free)} free"
    return Finding("storage", f"{place}: written, listed, read and deleted in {time.monotonic() - began:.1f} s{room}")


def look_at_services() -> Iterator[Finding]:
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
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
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
