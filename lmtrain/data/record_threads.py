"""The threads of ArrayRecord, which it starts with its first reader or writer in a process.

If one of them cannot be started, ArrayRecord does not raise an error but waits forever, for the threads that it has
started already.
"""

import functools
import threading

from lmtrain.config.errors import ReadError

# ArrayRecord's number, whatever the machine and the options.
_THREADS = 64


@functools.cache
def check_threads() -> None:
    """Raise `ReadError` if the process cannot have these threads: tries it, with the same number of Python's."""
    end = threading.Event()
    started = []
    try:
        for _ in range(_THREADS):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        raise ReadError(
            f"cannot start the {_THREADS} threads that read and write token shards: {error}. Free memory, or raise the "
            "limits on memory and threads of this process: see `ulimit -v`, `ulimit -u`, and those of its container"
        ) from None
    finally:
        end.set()
        for thread in started:
            thread.join()
