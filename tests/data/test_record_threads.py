"""ArrayRecord's threads: an error instead of a wait without an end if they cannot be started."""

import subprocess
import sys

import pytest

from lmtrain.data.token_store import check_threads

# With address space for a few of the threads' stacks.
LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
import array_record.python.array_record_module
from lmtrain.runtime.errors import ReadError
from lmtrain.data.cache_manifest import ShardInfo
from lmtrain.data.cache_manifest import Shards
from lmtrain.data.token_store import TokenStore
from lmtrain.preprocess.write_shard import _written

pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, resource.RLIM_INFINITY))
try:
    if sys.argv[1] == "read":
        shards = Shards()
        shards.add(ShardInfo(file="shard", source={}, bytes=16, sha256="", tokens=4, documents=1))
        TokenStore("train", shards, "uint16", lambda info: "shard").read(np.zeros(1, np.int64), 4)
    else:
        with _written("shard"):
            pass
except ReadError as error:
    print(error)
"""


def test_they_can_be_started():
    check_threads()


@pytest.mark.parametrize("action", ["read", "write"])
def test_too_little_memory_for_them_is_an_error_that_names_it(tmp_path, action):
    command = [sys.executable, "-c", LIMITED, action]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "cannot start the 64 threads that read and write token shards: can't start new thread"
    )
