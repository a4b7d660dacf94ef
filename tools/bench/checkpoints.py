"""Speed of saving, verifying and restoring checkpoints, relative to the disk, measured in the same run.

    .venv/bin/python tools/bench/checkpoints.py [--gib 1] [--folder .] [--rounds 3]

* disk, write: one file of the same size in blocks of 16 MiB, with fsync.
* disk, read: that file, after its pages were dropped from the page cache (posix_fadvise).
* synchronous save: Orbax's plain `Checkpointer`, until it returns.
* blocking: time for which `Checkpointer.save` blocks training. save: until all files are written, without hashing.
* hash: reading the files back and hashing them, as every save does in the background; hash alone: from memory, the
  limit of the processor.
* restore: onto the devices, from files not in the page cache; verify: the checksums of the same files.
Prints medians of the rounds, and ratios relative to the disk.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import xxhash

from lmtrain.checkpoint.arrays import ArrayWriter, load_arrays, with_shardings
from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.checkpoint.manifest import record_files
from lmtrain.checkpoint.verify import FULL, verify
from lmtrain.runtime.storage import list_files

_BLOCK = 1 << 24


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def write_file(path: str, size: int) -> None:
    block = os.urandom(_BLOCK)
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // _BLOCK):
            file.write(block)
        os.fsync(file.fileno())


def read_file(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(_BLOCK):
            pass


def sync_and_forget(folder: str) -> None:
    """Write cached pages to disk, and drop them from the page cache."""
    for name in list_files(folder):
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def make_state(gib: float) -> dict[str, Any]:
    """Parameters and twice as many moments, in arrays of up to 64 MiB of random, incompressible bits."""
    count = max(1, round(gib * 16 / 3))
    keys = iter(jax.random.split(jax.random.key(0), 3 * count))
    part = lambda: {f"layer{i}": jax.random.normal(next(keys), (4096, 4096), jnp.float32) for i in range(count)}  # noqa: E731  # thrice
    return {"params": part(), "optimizer": (part(), part())}


def one_round(folder: str, parts: dict[str, Any]) -> dict[str, float]:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(parts))
    found: dict[str, float] = {}
    path = os.path.join(folder, "plain")
    found["disk, write"] = seconds(lambda: write_file(path, size))
    sync_and_forget(folder)
    found["disk, read"] = seconds(lambda: read_file(path))
    os.remove(path)

    handlers = {name: ocp.PyTreeCheckpointHandler(use_compression=False) for name in parts}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as orbax:
        args = ocp.args.Composite(**{name: ocp.args.PyTreeSave(tree) for name, tree in parts.items()})
        found["synchronous save"] = seconds(lambda: orbax.save(os.path.join(folder, "plain"), args=args))
    shutil.rmtree(path)

    writer = ArrayWriter()

    def write() -> None:
        writer.start(path, parts)
        writer.wait()
        sync_and_forget(path)

    found["save"] = seconds(write)
    writer.close()
    found["hash"] = seconds(lambda: record_files(path, list_files(path)))
    block = os.urandom(_BLOCK)
    found["hash alone, one thread"] = seconds(lambda: [xxhash.xxh3_128_digest(block) for _ in range(size // _BLOCK)])
    shutil.rmtree(path)

    run = os.path.join(folder, "run")
    checkpointer = Checkpointer(run, CheckpointerConfig())
    found["blocking"] = checkpointer.save(1, Kind.PERMANENT, parts, {})
    checkpointer.finish()
    (found["save with hash and manifest"],) = checkpointer.take_saved()
    checkpoint = checkpointer.newest()
    assert checkpoint is not None
    sync_and_forget(checkpoint.path)
    found["verify"] = seconds(lambda: verify(checkpoint, FULL))
    sync_and_forget(checkpoint.path)
    like = with_shardings(parts, jax.tree.map(lambda leaf: leaf.sharding, parts))
    found["restore"] = seconds(
        lambda: jax.block_until_ready([load_arrays(checkpoint.path, name, tree) for name, tree in like.items()])
    )
    checkpointer.close()
    shutil.rmtree(run)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=os.path.abspath, default=".")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    parts = jax.block_until_ready(make_state(arguments.gib))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(parts))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rounds = [one_round(folder, parts) for _ in range(arguments.rounds)]
    took = {name: median(found[name] for found in rounds) for name in rounds[0]}
    for name, value in took.items():
        print(f"{name:<28} {value:7.2f} s  {size / value / 2**20:8.0f} MiB/s")
    print(f"blocking / synchronous save  {took['blocking'] / took['synchronous save']:.3f}  (goal: at most 0.1)")
    print(f"save, relative to disk       {took['disk, write'] / took['save']:.2f}  (goal: at least 0.7)")
    print(f"restore, relative to disk    {took['disk, read'] / took['restore']:.2f}  (goal: at least 0.7)")
    print(f"verify, relative to hash     {took['hash alone, one thread'] / took['verify']:.2f}")


if __name__ == "__main__":
    main()
