"""`lmtrain doctor [PLACE ...]`: diagnose this machine; each line is ok or says how to fix it."""

import itertools
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from importlib.metadata import requires
from typing import Any, Literal

from packaging.requirements import Requirement

from lmtrain.commands.arguments import Parser
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.runtime.distributed import JOB_STARTERS, detects_others
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.machine import has_tpu, installed_version, usable_cores
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.redact import redact
from lmtrain.runtime.storage import (
    delete_file,
    file_size,
    is_url,
    join,
    list_names,
    read_bytes,
    read_range,
    write_bytes,
)
from lmtrain.tracking.wandb import HOSTS as WANDB_HOSTS
from lmtrain.tracking.wandb import has_key


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`what` was checked, what was `seen`, and how to `fix` it.

    A `note` stops nothing; what is `BAD` would stop a run or make it wrong.
    """

    what: str
    seen: str
    state: Literal["ok", "note", "BAD"] = "ok"
    fix: str = ""

    def lines(self) -> list[str]:
        first = f"{self.state:<5}{self.what:<13}{self.seen}"
        return redact([first, *([f"{'':<18}-> {self.fix}"] if self.fix else [])])


def _ok(what: str, seen: str) -> Finding:
    return Finding(what=what, seen=seen)


def _note(what: str, seen: str, fix: str = "") -> Finding:
    return Finding(what=what, seen=seen, state="note", fix=fix)


def _bad(what: str, seen: str, fix: str) -> Finding:
    return Finding(what=what, seen=seen, state="BAD", fix=fix)


def look_at_cluster(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether this is one process of several, and how the processes would find each other."""
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts:
        worker = environment.get("TPU_WORKER_ID", "?")
        yield _ok("processes", f"TPU worker {worker} of {len(hosts.split(','))}: start the same command on each")
        return
    for starter, (count, index) in JOB_STARTERS.items():
        number = environment.get(count, "")
        if number.isdigit() and int(number) > 1:
            yield _ok("processes", f"{starter}: process {environment.get(index, '?')} of {number}")
            return
    if detects_others(environment):
        yield _ok("processes", "one of several, according to environment variables")
    elif "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        seen = f"one: inside Slurm job {environment['SLURM_JOB_ID']}, but not started by srun"
        yield _note("processes", seen, "`srun lmtrain train CONFIG` starts one on each node; see deploy/slurm")
    else:
        yield _ok("processes", "one; several hosts without Slurm or TPUs require trainer.distributed")
    if name := environment.get("RUN_ID"):
        yield _note("run id", f"{name}, from RUN_ID: every run in this environment resumes it")


# The accelerators: devices of the driver, devices that JAX finds, and a test computation.
#
# JAX runs in a separate process, which is killed after a timeout: a TPU that another process uses, or a driver that
# hangs, would block this process too.

_DEVICE_SECONDS = 120.0

_ASK = """
import json, jax, jax.numpy as jnp
device = jax.devices()[0]
x = jnp.arange(16.0).reshape(4, 4)
right = bool((jax.jit(lambda x: x @ x)(x) == jnp.asarray([[sum(float(4 * i + k) * (4 * k + j) for k in range(4))
                                                        for j in range(4)] for i in range(4)])).all())
stats = device.memory_stats() or {}
print(json.dumps({"backend": jax.default_backend(), "kind": device.device_kind, "count": jax.local_device_count(),
                  "memory": stats.get("bytes_limit"), "right": right}))
"""


def look_at_devices() -> Iterator[Finding]:
    """Accelerators as reported by their drivers and by JAX."""
    gpus = _nvidia()
    if isinstance(gpus, str):
        yield _bad("nvidia", gpus, "fix the NVIDIA driver first (restart the machine after an update)")
    elif gpus is not None:
        yield _ok("nvidia", f"{len(gpus)} x {gpus[0]}") if gpus else _note("nvidia", "no GPU")
    answer = _ask_jax()
    if isinstance(answer, str):
        held = "stop the process that uses the accelerator" if glob("/dev/accel*") or glob("/dev/vfio/*") else ""
        fix = held or "set JAX_PLATFORMS=cpu to run without accelerator"
        yield _bad("devices", f"JAX finds none: {answer}", fix)
    else:
        yield from _jax(answer, has_gpu=isinstance(gpus, list) and bool(gpus))


def _nvidia() -> list[str] | str | None:
    """A line for each GPU, or the reason why there is none; None without NVIDIA's driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_DEVICE_SECONDS)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not respond"
    if done.returncode:
        return ((done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _ask_jax() -> dict[str, Any] | str:
    """JAX's report of its devices, or the reason why there is none."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    command = [sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEVICE_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return f"no response within {_DEVICE_SECONDS:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _jax(answer: dict[str, Any], has_gpu: bool) -> Iterator[Finding]:
    memory = f", {format_bytes(answer['memory'])} each" if answer["memory"] else ""
    seen = f"{answer['count']} x {answer['kind']} ({answer['backend']}{memory})"
    on_cpu, platforms = answer["backend"] == "cpu", os.environ.get("JAX_PLATFORMS", "")
    if not answer["right"]:
        fix = "do not train on it: the device or its driver is broken"
        yield _bad("devices", f"{seen}: wrong result of a small matrix product", fix)
    elif on_cpu and has_gpu:
        install = "`pip install 'jax[cuda12]'`, or 'jax[cuda13]' with driver 580 or newer"
        fix = f"unset JAX_PLATFORMS, which is {platforms}" if platforms else install
        yield _bad("devices", f"{seen}: JAX does not use the GPU", fix)
    elif on_cpu and has_tpu():
        fix = "`pip install 'jax[tpu]'`, and JAX_PLATFORMS must not be cpu"
        yield _bad("devices", f"{seen}: JAX does not use the TPU", fix)
    else:
        yield _ok("devices", seen)
        device = find_accelerator(answer["kind"])
        if device is None:
            yield _note("peak", f"unknown for {answer['kind']}: MFU is not logged")
        else:
            yield _ok("peak", f"{device.peak_flops / 1e12:,.0f} TFLOP/s each in 16 bits: the reference of MFU")


# Printed with their versions; all requirements of lmtrain are checked.
_SHOWN = ("lmtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
# Grain, Orbax and Ray open many files at once; checkpoints of large models more.
_MIN_FILES = 4096
_MIN_DISK = 10 << 30


def look_at_machine() -> Iterator[Finding]:
    """Python, libraries, cores, memory, limits and disks."""
    python = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info < (3, 14):
        yield _ok("python", python)
    else:
        yield _note("python", python, "lmtrain is tested with Python 3.11 to 3.13")
    yield _libraries()
    yield _ok("host", f"{platform.platform()}, {usable_cores()} cores{_memory()}")
    yield from _limits()
    usage = shutil.disk_usage(os.getcwd())
    seen = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free at {os.getcwd()}"
    fix = "a checkpoint takes 12 bytes per parameter in float32 with Adam; see trainer.checkpointer.base_path"
    yield _ok("disk", seen) if usage.free >= _MIN_DISK else _note("disk", seen, fix)


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
    return _bad("libraries", "; ".join([seen, *wrong]), fix) if wrong else _ok("libraries", seen)


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
    yield _note("open files", seen, fix) if is_low else _ok("open files", seen)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        fix = "run `ulimit -f unlimited`: shards and checkpoints are larger"
        yield _bad("file size", f"files are limited to {format_bytes(size)}", fix)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"


_SECONDS = 5.0
_PROBE_BYTES = 1 << 20


def look_at_place(place: str) -> Finding:
    """Test one place: read the start of a file; write, list, read and delete a file in a folder or bucket.

    A folder that does not exist yet is not created: its nearest existing parent is tested.
    """
    began = time.monotonic()
    place = place if is_url(place) else os.path.expanduser(place)
    try:
        size = file_size(place)
        if size is not None:
            if size:
                read_range(place, 0, _PROBE_BYTES)
            return _ok("storage", f"{place}: a file of {format_bytes(size)}, readable{_after(began)}")
        if _names_files(place):
            return _bad("storage", f"{place}: no such file", "to test a folder or a bucket, name it without a file")
        folder = place if is_url(place) else _nearest_folder(place)
        if not _keeps(folder):
            seen = f"{folder}: the bytes read differ from those written"
            return _bad("storage", seen, "do not store checkpoints there")
    except UserError as error:
        text, _, advice = str(error).partition("\n")
        return _bad("storage", text, advice.strip())
    except OSError as error:
        fix = "the user that runs lmtrain needs write permission"
        return _bad("storage", f"{place}: {error.strerror or error}", fix)
    missing = "" if folder == place else f"does not exist yet, can be created; {folder}: "
    room = "" if is_url(place) else f", {format_bytes(shutil.disk_usage(folder).free)} free"
    return _ok("storage", f"{place}: {missing}written, listed, read and deleted{_after(began)}{room}")


def _keeps(folder: str) -> bool:
    """Whether a file written to a folder can be listed and read back."""
    name, content = f".lmtrain-doctor-{uuid.uuid4().hex}", os.urandom(_PROBE_BYTES)
    probe = join(folder, name)
    write_bytes(probe, content)
    try:
        return name in list_names(folder) and read_bytes(probe) == content
    finally:
        delete_file(probe)


def _names_files(place: str) -> bool:
    """Whether a name denotes files rather than a folder: by its extension or wildcards."""
    name = place.rpartition("/")[2]
    return bool(re.search(r"[*?{\[]", name) or re.search(r"\.(yaml|yml|jsonl?|txt|parquet|gz|zst|bz2|xz)$", name))


def _nearest_folder(place: str) -> str:
    """The folder itself, else its nearest existing parent."""
    while not os.path.exists(place):
        place = os.path.dirname(os.path.abspath(place))
    return place


def _after(began: float) -> str:
    return f" in {time.monotonic() - began:.1f} s"


def look_at_services() -> Iterator[Finding]:
    """Credentials and reachability of trackers and hubs; nothing is uploaded."""
    yield _wandb()
    yield _hub()


def _wandb() -> Finding:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return _note("wandb", f"WANDB_MODE is {os.environ['WANDB_MODE']}")
    if not has_key():
        fix = "run `wandb login`, set WANDB_API_KEY, or choose another tracker"
        return _note("wandb", "no API key: runs log offline", fix)
    host = os.environ.get("WANDB_BASE_URL", f"https://{WANDB_HOSTS[0]}")
    if reason := _unreachable(host):
        seen = f"API key found, but {host} is unreachable ({reason}): runs log offline"
        return _note("wandb", seen, "upload them later with `wandb sync`")
    return _ok("wandb", f"API key found, {host} responds")


def _hub() -> Finding:
    from lmtrain.hf.hub import endpoint, find_token, offline_reason, prepare_hub

    if not prepare_hub():
        fix = "only models and tokenizers in the hub's local cache can be used"
        return _note("hub", f"offline: {offline_reason()}", fix)
    if find_token() is None:
        fix = "run `hf auth login`, or set HF_TOKEN, for gated models and uploads"
        return _note("hub", f"{endpoint()} responds; no token", fix)
    return _ok("hub", f"{endpoint()} responds, token found")


def _unreachable(url: str) -> str:
    """Why a server does not respond; empty if it does, with any HTTP status."""
    try:
        urllib.request.urlopen(url, timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""


def run(argv: list[str]) -> int:
    parser = Parser(
        "doctor",
        "Check this machine: devices, libraries, limits, other processes, storage, services. "
        "Exits with 1 if a problem would stop a run.",
    )
    parser.add_argument(
        "places", nargs="*", metavar="PLACE", help="folders, buckets and files to test, as paths or URLs"
    )
    arguments = parser.parse_args(argv)
    bad = 0
    places = (look_at_place(place) for place in arguments.places)
    for finding in itertools.chain(look_at_machine(), look_at_devices(), look_at_cluster(), places, look_at_services()):
        print("\n".join(finding.lines()), flush=True)
        bad += finding.state == "BAD"
    print(f"{bad} blocking problem{'s' if bad > 1 else ''}" if bad else "ready to train")
    return 1 if bad else 0
