"""A request to a worker: config, vocabulary size, devices and steps. Plain data, so that it has a stable key."""

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lmtrain
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import ACCELERATORS
from lmtrain.runtime.packages import installed_version
from lmtrain.runtime.topologies import Topology

STEPS = ("train", "eval")

# Settings that do not change the compiled program.
_TRAINER_SKIPS = {
    *("id", "log_dir", "tracker", "profiler", "checkpointer", "ray", "distributed", "jax_compilation_cache_dir"),
    *("load_checkpoint", "load_checkpoint_path", "initialize_from"),
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")

# platform -> modules that hold its compiler, and how to install one
_COMPILERS = {
    "tpu": (("libtpu",), "pip install 'lmtrain[tpu]'"),
    "gpu": (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "pip install 'lmtrain[cuda12]' (or cuda13)"),
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


@dataclass(frozen=True)
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
        return cls(topology.accelerator.kind, topology.shape, topology.slices)

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


@dataclass(frozen=True)
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
        return cls(values | {"data": kept}, vocab_size, target, steps, compile_it, teacher)

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
