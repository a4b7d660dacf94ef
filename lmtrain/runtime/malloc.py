"""Memory that a step frees stays with the process for the next step."""

import ctypes

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, in one heap; does nothing with a C library other than glibc.

    To be called before any thread is made: a heap that a thread has already is not given up, and goes to other threads
    later; large blocks go past it.

    By default glibc maps every large block anew and gives it back when it is freed. On a CPU the arrays of a step are
    such blocks: unmapping them is a pause between two steps, and touching them again a page fault for every 4 KiB.
    Costs address space: the process stays as large as it once was.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, -1)
    mallopt(_ARENA_MAX, 1)
