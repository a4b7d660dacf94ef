"""The Hugging Face hub: whether it can be reached, decided once and quickly."""

import functools
import os
import socket
import urllib.parse

_TIMEOUT_SECONDS = 3.0


@functools.cache
def prepare_hub() -> bool:
    """Whether the hub can be reached; if not, its libraries are told so, and use what is in their cache at once.

    To be called before the first import of huggingface_hub, transformers or datasets in a process: they read
    HF_HUB_OFFLINE only then, and without it try for half a minute.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    url = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), _TIMEOUT_SECONDS).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return False
    return True
