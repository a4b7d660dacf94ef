"""A request to a worker: config, vocabulary size, devices and steps. Plain data, so that it has a stable key."""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lmtrain
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import ACCELERATORS
from lmtrain.runtime.topologies import Topology

STEPS = ("train", "eval")

# Settings that do not change the compiled program.
_TRAINER_SKIPS = {
    *("id", "log_dir", "tracker", "profiler", "checkpointer", "ray", "distributed", "jax_compilation_cache_dir"),
    *("load_checkpoint", "load_checkpoint_path", "initialize_from"),
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")

# platform -> modules that hold its compiler, and the extra that installs one
_COMPILERS = {"tpu": (("libtpu",), "tpu"), "gpu": (("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"), "cuda12")}


@dataclass(frozen=True)
class Target:
    """Devices to plan for: a topology of a `kind`; without a `kind`, `shape` fake CPU devices.

    Without a `kind` and with an empty `shape`, all devices of this machine; `found` is their number once it is known.
    """

    kind: str | None = None
    shape: tuple[int, ...] = ()
    slices: int = 1
    found: int = 1

    @classmethod
    def of(cls, topology: Topology) -> "Target":
        return cls(topology.accelerator.kind, topology.shape, topology.slices)

    @property
    def num_devices(self) -> int:
        topology = self.topology
        return topology.num_devices if topology else math.prod(self.shape) if self.shape else self.found

    @property
    def topology(self) -> Topology | None:
        return None if self.kind is None else Topology(ACCELERATORS[self.kind], self.shape, self.slices)

    @property
    def missing_extra(self) -> str | None:
        """The extra of lmtrain that would install this target's compiler; None if it is installed."""
        if self.kind is None:
            return None
        modules, extra = _COMPILERS[ACCELERATORS[self.kind].platform]
        return None if any(_is_installed(module) for module in modules) else extra


@dataclass(frozen=True)
class Request:
    """One request. `compile` is false if only the estimate is needed, or if no compiler is installed."""

    config: Mapping[str, Any]
    vocab_size: int
    target: Target
    steps: tuple[str, ...] = ("train",)
    compile: bool = True

    @classmethod
    def of(
        cls, config: RunConfig, vocab_size: int, target: Target, steps: tuple[str, ...], compile_it: bool
    ) -> "Request":
        return cls(_program_settings(config), vocab_size, target, steps, compile_it)

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
        text = json.dumps([self.to_json(), _versions(), _source_hash()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _program_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a compiled program depends on."""
    exclude = {"trainer": _TRAINER_SKIPS}
    include = {"model", "optimizer", "trainer", "objective", "z_loss_weight"}
    if config.lora is not None:  # which requires a base
        include |= {"lora", "initialize_from_hf", "initialize_from_checkpoint_path"}
    values = config.model_dump(mode="json", include=include, exclude=exclude)
    data = config.data
    kept = {"mask_across_documents": data.mask_across_documents, "reset_positions": data.has_positions}
    return values | {"data": kept}


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def _source_hash() -> str:
    """Hash of lmtrain's source code, since a change of the step changes the program."""
    folder = Path(lmtrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
