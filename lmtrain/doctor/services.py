"""Storage and services: folders, buckets and files, W&B, the Hugging Face Hub. No token is ever printed."""

import os
import re
import shutil
import time
import urllib.request
import uuid
from collections.abc import Iterator

from lmtrain.config.errors import UserError
from lmtrain.doctor.finding import Finding
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.storage import (
    delete_file,
    file_size,
    is_url,
    join,
    list_names,
    read_bytes,
    read_range,
    write_bytes,
)
from lmtrain.tracking.wandb import HOSTS as WANDB_HOSTS
from lmtrain.tracking.wandb import has_key

_SECONDS = 5.0
_PROBE_BYTES = 1 << 20


def look_at_place(place: str) -> Finding:
    """Test one place: read the start of a file; write, list, read and delete a file in a folder or bucket.

    A folder that does not exist yet is not created: its nearest existing parent is tested.
    """
    began = time.monotonic()
    place = place if is_url(place) else os.path.expanduser(place)
    try:
        size = file_size(place)
        if size is not None:
            if size:
                read_range(place, 0, _PROBE_BYTES)
            return Finding("storage", f"{place}: a file of {format_bytes(size)}, readable{_after(began)}")
        if _names_files(place):
            fix = "to test a folder or a bucket, name it without a file"
            return Finding("storage", f"{place}: no such file", "BAD", fix)
        folder = place if is_url(place) else _nearest_folder(place)
        if not _keeps(folder):
            fix = "do not store checkpoints there"
            return Finding("storage", f"{folder}: the bytes read differ from those written", "BAD", fix)
    except UserError as error:
        text, _, advice = str(error).partition("\n")
        return Finding("storage", text, "BAD", advice.strip())
    except OSError as error:
        fix = "the user that runs lmtrain needs write permission"
        return Finding("storage", f"{place}: {error.strerror or error}", "BAD", fix)
    missing = "" if folder == place else f"does not exist yet, can be created; {folder}: "
    room = "" if is_url(place) else f", {format_bytes(shutil.disk_usage(folder).free)} free"
    return Finding("storage", f"{place}: {missing}written, listed, read and deleted{_after(began)}{room}")


def _keeps(folder: str) -> bool:
    """Whether a file written to a folder can be listed and read back."""
    name, content = f".lmtrain-doctor-{uuid.uuid4().hex}", os.urandom(_PROBE_BYTES)
    probe = join(folder, name)
    write_bytes(probe, content)
    try:
        return name in list_names(folder) and read_bytes(probe) == content
    finally:
        delete_file(probe)


def _names_files(place: str) -> bool:
    """Whether a name denotes files rather than a folder: by its extension or wildcards."""
    name = place.rpartition("/")[2]
    return bool(re.search(r"[*?{\[]", name) or re.search(r"\.(yaml|yml|jsonl?|txt|parquet|gz|zst|bz2|xz)$", name))


def _nearest_folder(place: str) -> str:
    """The folder itself, else its nearest existing parent."""
    while not os.path.exists(place):
        place = os.path.dirname(os.path.abspath(place))
    return place


def _after(began: float) -> str:
    return f" in {time.monotonic() - began:.1f} s"


def look_at_services() -> Iterator[Finding]:
    """Credentials and reachability of trackers and hubs; nothing is uploaded."""
    yield _wandb()
    yield _hub()


def _wandb() -> Finding:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return Finding("wandb", f"WANDB_MODE is {os.environ['WANDB_MODE']}", "note")
    if not has_key():
        fix = "run `wandb login`, set WANDB_API_KEY, or choose another tracker"
        return Finding("wandb", "no API key: runs log offline", "note", fix)
    host = os.environ.get("WANDB_BASE_URL", f"https://{WANDB_HOSTS[0]}")
    reason = _unreachable(host)
    if reason:
        seen = f"API key found, but {host} is unreachable ({reason}): runs log offline"
        return Finding("wandb", seen, "note", "upload them later with `wandb sync`")
    return Finding("wandb", f"API key found, {host} responds")


def _hub() -> Finding:
    from lmtrain.hf.hub import endpoint, find_token, offline_reason, prepare_hub

    if not prepare_hub():
        fix = "only models and tokenizers in the hub's local cache can be used"
        return Finding("hub", f"offline: {offline_reason()}", "note", fix)
    if find_token() is None:
        fix = "run `hf auth login`, or set HF_TOKEN, for gated models and uploads"
        return Finding("hub", f"{endpoint()} responds; no token", "note", fix)
    return Finding("hub", f"{endpoint()} responds, token found")


def _unreachable(url: str) -> str:
    """Why a server does not respond; empty if it does, with any HTTP status."""
    try:
        urllib.request.urlopen(url, timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""
