"""A request to a worker (config, vocabulary size, devices and steps: plain data with a stable key) and its answers."""

import contextlib
import functools
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lmtrain
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import ACCELERATORS, Topology
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.machine import installed_version
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.runtime.storage import UNUSED_SECONDS, remove_temporaries

STEPS = ("train", "eval")

# Settings that do not change the compiled program.
_TRAINER_SKIPS = {
    *("id", "log_dir", "tracker", "profiler", "checkpointer", "ray", "distributed", "jax_compilation_cache_dir"),
    *("load_checkpoint", "load_checkpoint_path", "initialize_from"),
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")

# platform -> modules that hold its compiler, and how to install one
_COMPILERS = {
    "tpu": (("libtpu",), "pip install 'jax[tpu]'"),
    "gpu": (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "pip install 'jax[cuda12]' (or cuda13)"),
}

# libtpu would otherwise query a metadata server, which only Google's machines have; and use a lock file
_FOR_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Devices to plan for: a topology of a `kind`; without a `kind`, `shape` fake CPU devices.

    Without a `kind` and with an empty `shape`, all devices of this machine; `local` is their number once it is known.
    """

    kind: str | None = None
    shape: tuple[int, ...] = ()
    slices: int = 1
    local: int = 1

    @classmethod
    def of(cls, topology: Topology) -> "Target":
        return cls(kind=topology.accelerator.kind, shape=topology.shape, slices=topology.slices)

    @property
    def num_devices(self) -> int:
        topology = self.topology
        return topology.num_devices if topology else math.prod(self.shape) if self.shape else self.local

    @property
    def topology(self) -> Topology | None:
        return None if self.kind is None else Topology(ACCELERATORS[self.kind], self.shape, self.slices)

    @property
    def missing_compiler(self) -> str | None:
        """How to install this target's compiler; None if it is installed."""
        if self.kind is None:
            return None
        modules, install = _COMPILERS[ACCELERATORS[self.kind].platform]
        return None if any(map(_is_installed, modules)) else install

    def environment(self, compiles: bool) -> dict[str, str]:
        """Variables that JAX and the target's compiler read when they are loaded; only for the worker's process."""
        if self.kind is None and not self.shape:
            return {}
        common = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if self.kind is None or not compiles:
            flags = os.environ.get("XLA_FLAGS", "")
            return common | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={self.num_devices}".strip()}
        if ACCELERATORS[self.kind].platform == "gpu":
            return common | {"CUDA_VISIBLE_DEVICES": ""}
        return common | _FOR_LIBTPU


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. `compile` is false if only the state's memory is needed, or if no compiler is installed.

    `teacher`: of a distillation, the teacher's config.json, on which the program depends as on the config.
    """

    config: Mapping[str, Any]
    vocab_size: int
    target: Target
    steps: tuple[str, ...] = ("train",)
    compile: bool = True
    teacher: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        vocab_size: int,
        target: Target,
        steps: tuple[str, ...],
        compile_it: bool,
        teacher: Mapping[str, Any] | None = None,
    ) -> "Request":
        """The request for a config, of which it has the settings that a compiled program depends on."""
        include = {"model", "optimizer", "trainer", "objective", "z_loss_weight"}
        if config.lora is not None or config.objective.needs_reference:  # which require an initial model
            include |= {"lora", "initialize_from_hf", "initialize_from_checkpoint_path"}
        if config.transfer is not None:
            include |= {"transfer"}
        values = config.model_dump(mode="json", include=include, exclude={"trainer": _TRAINER_SKIPS})
        data = config.data
        kept: dict[str, Any] = {"mask_across_documents": data.mask_across_documents}
        kept["reset_positions"] = data.has_positions
        if data.has_pairs:
            kept["format"] = {"type": "preference"}
        if config.loss_weights is not None:
            kept["configs"] = {name: {} for name in config.loss_weights}
        return cls(
            config=values | {"data": kept},
            vocab_size=vocab_size,
            target=target,
            steps=steps,
            compile=compile_it,
            teacher=teacher,
        )

    def changed(self, changes: Mapping[str, Any], **fields: Any) -> "Request":
        """A copy with changed settings, `{"trainer.model_axis_size": 2}`, and changed fields."""
        config = {name: dict(part) if isinstance(part, Mapping) else part for name, part in self.config.items()}
        for path, value in changes.items():
            section, _, name = path.partition(".")
            config[section][name] = value
        return replace(self, config=config, **fields)

    @property
    def run_config(self) -> RunConfig:
        return RunConfig.model_validate(self.config)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Request":
        values = json.loads(text)
        target = values.pop("target")
        steps = tuple(values.pop("steps"))
        return cls(target=Target(**target | {"shape": tuple(target["shape"])}), steps=steps, **values)

    @property
    def key(self) -> str:
        """The cache key of the answer: equal for equal settings, devices, code and versions."""
        text = json.dumps(
            [self.to_json(), [installed_version(name) for name in _PACKAGES], _source_hash()], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


@functools.cache
def _source_hash() -> str:
    """Hash of lmtrain's source code, since a change of the step changes the program."""
    folder = Path(lmtrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


_POLL_SECONDS = 0.05

# Lines of compilers and of JAX that do not explain why a compile failed.
_NOISE = re.compile(
    r"^(\s|W\d{4}|I\d{4}|WARNING|Jax plugin|Traceback|During handling|The above|For simplicity|-{4,}|$)"
)
_QUOTED_LINES, _QUOTED_LENGTH = 4, 400


@dataclass(frozen=True)
class Plan:
    """The answer to a request: what is known of the `program` without compiling it, figures by step, and why figures
    are missing (empty if none are)."""

    program: dict[str, Any]
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: str = ""

    @property
    def state_bytes(self) -> int:
        """Bytes of the training state per device."""
        return sum(self.program["state"].values())

    @property
    def peaks(self) -> list[int]:
        """Peak bytes of the compiled steps."""
        return [step["memory"]["peak"] for step in self.steps.values() if "memory" in step]

    @property
    def is_refused(self) -> bool:
        """Whether a compiler found that a step does not fit."""
        return any("does_not_fit" in step for step in self.steps.values())

    def fits(self, capacity: float | None) -> bool | None:
        """Whether all compiled steps fit; without any, false if already the state does not; None if unknown."""
        if self.is_refused:
            return False
        if capacity is None:
            return None
        if not self.steps:
            return False if self.state_bytes > capacity else None
        return max(self.peaks) <= capacity


# What XLA prints before it aborts, and then a stack.
_FAILED_CHECK = re.compile(r"(?:Check failed|RET_CHECK failure|INTERNAL).*")


def ask(request: Request, timeout: float, progress: Callable[[str], None] = lambda text: None) -> Plan:
    """The answer to a request, from the cache or by a worker. `progress` is called repeatedly with a line of text.

    If a compiler fails, is killed or takes longer than `timeout` seconds, the answer has the reason instead of its
    figures. Raises `UserError` for errors in settings, and `StoppedError` after a signal.
    """
    folder = cache_folder() / request.key
    steps = request.steps if request.compile else ()
    known = _read(folder, steps)
    if known is not None and len(known.steps) == len(steps):
        return known
    folder.mkdir(parents=True, exist_ok=True)
    remove_temporaries(str(folder), age=UNUSED_SECONDS)
    missing = tuple(step for step in steps if known is None or step not in known.steps)
    # workers of concurrent plans write the same bytes, each file under a unique temporary name first
    with StopRequest("ending the compiler") as stop, tempfile.TemporaryDirectory(prefix="lmtrain-plan-") as temporary:
        failure = _work(replace(request, steps=missing), Path(temporary), folder, timeout, progress, stop)
    answer = _read(folder, steps)
    if answer is None:
        raise UserError(f"the worker process of the plan failed: {failure or 'it wrote no answer'}")
    return replace(answer, failure=failure)


def read_hlo(request: Request, step: str) -> str | None:
    """The optimized program (HLO text) of an answered request; None if it was not compiled.

    Raises `UserError` if it is corrupt.
    """
    path = cache_folder() / request.key / f"{step}.hlo.gz"
    try:
        return gzip.decompress(path.read_bytes()).decode() if path.exists() else None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        shutil.rmtree(path.parent, ignore_errors=True)
        raise UserError(f"{path} was corrupt and has been deleted; run the command again") from None


def cache_folder() -> Path:
    """The cache folder of answers, below XDG_CACHE_HOME (default: ~/.cache). Raises `UserError` if it has none."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(root) / "lmtrain" / "plans"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{folder}: plans cannot be cached: {error}; set XDG_CACHE_HOME to another folder") from None
    return folder


def _read(folder: Path, steps: tuple[str, ...]) -> Plan | None:
    """The cached parts of an answer; None without its first part. A corrupt file counts as missing."""
    program = _read_json(folder / "program.json", ("device", "devices", "mesh", "state", "advice"))
    if program is None:
        return None
    read = {step: _read_json(folder / f"{step}.json", ("step",)) for step in steps}
    return Plan(program, {step: figures for step, figures in read.items() if figures is not None})


def _read_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and all(key in values for key in keys) else None


def _work(
    request: Request, temporary: Path, folder: Path, timeout: float, progress: Callable[[str], None], stop: StopRequest
) -> str:
    """Run a worker until it exits; it writes its answer into `folder`. -> why it failed; empty on success"""
    asked, log, user_error = (temporary / name for name in ("request.json", "log.txt", "error.txt"))
    asked.write_text(request.to_json())
    command = [sys.executable, "-m", "lmtrain.plan.worker", str(asked), str(folder)]
    began = compiling_since = time.monotonic()
    variables = request.target.environment(request.compile)
    with open(log, "w") as file, _running(command, file, variables) as process:
        while process.poll() is None and not stop.requested:
            if not (folder / "program.json").exists():
                compiling_since = time.monotonic()
            elif time.monotonic() - compiling_since > timeout:
                return f"timeout: it took longer than --compile_timeout {timeout:.0f} s"
            progress(f"{_doing(folder, request)}, {time.monotonic() - began:.0f} s")
            time.sleep(_POLL_SECONDS)
        if stop.requested:
            raise StoppedError
        code = process.returncode
    if user_error.exists():
        raise UserError(user_error.read_text())
    if code == 0:
        return ""
    if code == -signal.SIGKILL:
        return "the compiler's process was killed (SIGKILL), probably because this machine ran out of memory"
    text = log.read_text(errors="replace")
    if code < 0:
        found = _FAILED_CHECK.search(text)
        reason = found[0][:_QUOTED_LENGTH] if found else "without a reason"
        return f"the compiler cannot compile this program and aborted ({signal.Signals(-code).name}): {reason}"
    return quote(text) or f"the compiler's process exited with code {code}"


@contextlib.contextmanager
def _running(command: list[str], log: Any, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed on exit from the block."""
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | variables)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _doing(folder: Path, request: Request) -> str:
    if not (folder / "program.json").exists():
        return "tracing the model"
    steps = request.steps if request.compile else ()
    left = next((step for step in steps if not (folder / f"{step}.json").exists()), None)
    actions = {"train": "compiling the training step", "eval": "compiling the evaluation step"}
    return "finishing" if left is None else actions.get(left, "running a few steps")


def quote(text: str) -> str:
    """The lines of a failed worker's output that state the reason: the end of a Python error, without the traceback."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return "\n".join(line[:_QUOTED_LENGTH] for line in lines[-_QUOTED_LINES:])
