"""The host: Python and libraries, cores and memory, limits of the system, the disk."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from lmtrain.doctor.finding import Finding, State
from lmtrain.runtime.cores import usable_cores
from lmtrain.runtime.progress import format_bytes

# Printed with their versions; all requirements of lmtrain are checked.
_SHOWN = ("lmtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
# Grain, Orbax and Ray open many files at once; checkpoints of large models more.
_FEWEST_FILES = 4096
_LEAST_DISK = 10 << 30


def look_at_machine() -> Iterator[Finding]:
    """Python, libraries, cores, memory, limits and disks."""
    yield _python()
    yield _libraries()
    yield Finding("host", f"{platform.platform()}, {usable_cores()} cores{_memory()}")
    yield _open_files()
    yield from _other_limits()
    yield _disk(os.getcwd())


def _python() -> Finding:
    seen = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < (3, 11) or sys.version_info >= (3, 14):
        return Finding("python", seen, State.NOTE, "lmtrain is tested with Python 3.11 to 3.13")
    return Finding("python", seen)


def _libraries() -> Finding:
    seen = ", ".join(f"{name} {installed_version(name) or 'missing'}" for name in _SHOWN)
    wrong = []
    for text in requires("lmtrain") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = installed_version(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} is {found or 'missing'}, required is {wanted.specifier}")
    if wrong:
        return Finding(
            "libraries",
            f"{seen}; {'; '.join(wrong)}",
            State.BAD,
            "reinstall lmtrain: `pip install -c tools/constraints.txt .`",
        )
    return Finding("libraries", seen)


def installed_version(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in file}
    except OSError:
        return ""
    return f", {format_bytes(sizes['MemAvailable'])} of {format_bytes(sizes['MemTotal'])} memory free"


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"limit {_limit(soft)} (can be raised to {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < _FEWEST_FILES:
        return Finding(
            "open files",
            seen,
            State.NOTE,
            f"run `ulimit -n {_FEWEST_FILES * 16}` before a run: large checkpoints and Ray open many files",
        )
    return Finding("open files", seen)


def _other_limits() -> Iterator[Finding]:
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        yield Finding(
            "file size",
            f"files are limited to {format_bytes(size)}",
            State.BAD,
            "run `ulimit -f unlimited`: shards and checkpoints are larger",
        )


def _disk(folder: str) -> Finding:
    usage = shutil.disk_usage(folder)
    seen = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free at {folder}"
    if usage.free < _LEAST_DISK:
        return Finding(
            "disk",
            seen,
            State.NOTE,
            "a checkpoint takes 12 bytes per parameter in float32 with Adam; see trainer.checkpointer.base_path",
        )
    return Finding("disk", seen)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"
