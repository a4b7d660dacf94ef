"""The host: Python and libraries, cores and memory, limits of the system, the disk."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import requires

from packaging.requirements import Requirement

from lmtrain.doctor.finding import Finding
from lmtrain.runtime.machine import usable_cores
from lmtrain.runtime.packages import installed_version
from lmtrain.runtime.progress import format_bytes

# Printed with their versions; all requirements of lmtrain are checked.
_SHOWN = ("lmtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
# Grain, Orbax and Ray open many files at once; checkpoints of large models more.
_MIN_FILES = 4096
_MIN_DISK = 10 << 30


def look_at_machine() -> Iterator[Finding]:
    """Python, libraries, cores, memory, limits and disks."""
    python = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info < (3, 14):
        yield Finding("python", python)
    else:
        yield Finding("python", python, "note", "lmtrain is tested with Python 3.11 to 3.13")
    yield _libraries()
    yield Finding("host", f"{platform.platform()}, {usable_cores()} cores{_memory()}")
    yield from _limits()
    yield _disk(os.getcwd())


def _libraries() -> Finding:
    seen = ", ".join(f"{name} {installed_version(name) or 'missing'}" for name in _SHOWN)
    wrong = []
    for text in requires("lmtrain") or []:
        required = Requirement(text)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        installed = installed_version(required.name)
        if installed is None or not required.specifier.contains(installed, prereleases=True):
            wrong.append(f"{required.name} is {installed or 'missing'}, required is {required.specifier}")
    fix = "reinstall lmtrain: `pip install -c tools/constraints.txt .`"
    return Finding("libraries", "; ".join([seen, *wrong]), "BAD", fix) if wrong else Finding("libraries", seen)


def _memory() -> str:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in file}
    except OSError:
        return ""
    return f", {format_bytes(sizes['MemAvailable'])} of {format_bytes(sizes['MemTotal'])} memory free"


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"limit {_limit(soft)} (can be raised to {_limit(hard)})"
    fix = f"run `ulimit -n {_MIN_FILES * 16}` before a run: large checkpoints and Ray open many files"
    is_low = soft != resource.RLIM_INFINITY and soft < _MIN_FILES
    yield Finding("open files", seen, "note", fix) if is_low else Finding("open files", seen)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        fix = "run `ulimit -f unlimited`: shards and checkpoints are larger"
        yield Finding("file size", f"files are limited to {format_bytes(size)}", "BAD", fix)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"


def _disk(folder: str) -> Finding:
    usage = shutil.disk_usage(folder)
    seen = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free at {folder}"
    fix = "a checkpoint takes 12 bytes per parameter in float32 with Adam; see trainer.checkpointer.base_path"
    return Finding("disk", seen, "note", fix) if usage.free < _MIN_DISK else Finding("disk", seen)
