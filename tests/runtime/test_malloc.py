"""Freed memory is reused without system calls: counted as page faults in a subprocess."""

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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="requires glibc on Linux")
def test_freed_memory_is_not_mapped_again():
    """With transparent huge pages there is less than one fault per 4 KiB, but more than none."""
    faults = {
        word: int(
            subprocess.run([sys.executable, "-c", FAULTS, word], capture_output=True, check=True, text=True).stdout
        )
        for word in ("keep", "default")
    }
    assert faults["keep"] < 10
    assert faults["default"] > 3 * faults["keep"] + 20
