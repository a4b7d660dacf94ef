"""Configuration of malloc: memory freed by a step stays in the process for the next step."""

import ctypes

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Configure malloc to keep freed memory, in one heap. No effect with a C library other than glibc.

    Call it before any thread is started: an existing heap of a thread is kept and reused by later threads, and large
    blocks would bypass the main heap.

    By default glibc maps every large block with mmap and unmaps it when it is freed. On a CPU the arrays of a step are
    such blocks: unmapping them pauses training between steps, and mapping them again causes a page fault for every
    4 KiB. The cost: the process never shrinks below its peak size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_ARENA_MAX, 1)
