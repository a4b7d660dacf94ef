"""Freed memory is used again without asking the system for it: counted in page faults, by a process of its own."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from lmtrain.runtime.malloc import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(8 << 20, np.uint8) for _ in range(8)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(faults)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc, which is on Linux")
def test_what_was_freed_is_not_mapped_again():
    """Linux with large pages for all takes fewer faults than 4 KiB each, but never none."""
    faults = {
        word: int(
            subprocess.run([sys.executable, "-c", FAULTS, word], capture_output=True, check=True, text=True).stdout
        )
        for word in ("keep", "as it is")
    }
    assert faults["keep"] < 10
    assert faults["as it is"] > 3 * faults["keep"] + 20
