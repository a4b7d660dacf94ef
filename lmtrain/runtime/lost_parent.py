"""The end of a process whose parent was killed."""

import os
import threading
import time


def end_with_parent(parent: int) -> None:
    """From now on, end this process at once when its parent is no longer the process `parent`."""
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
