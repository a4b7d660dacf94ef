"""Settings of how a run executes: processes, a Ray cluster for preprocessing, and the dtypes of `trainer.mp`."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from lmtrain.config.section import Duration, Section, execution
from lmtrain.runtime.errors import field_error

DeviceId = Annotated[int, Field(ge=0)]


class DistributedConfig(Section):
    """Connection of the processes of a run (`jax.distributed`). Not needed on TPU and Slurm, where JAX detects it."""

    coordinator_address: str | None = execution(None, description="Address of process 0, as host:port; null: detected")
    num_processes: int | None = execution(None, ge=1, description="Number of processes of the run; null: detected")
    process_id: int | None = execution(None, ge=0, description="Index of this process, from 0; null: detected")
    local_device_ids: DeviceId | list[DeviceId] | None = execution(
        None, description="Device indices used by this process; null: those of CUDA_VISIBLE_DEVICES, or all"
    )

    heartbeat_timeout: Duration = execution(
        timedelta(seconds=30),
        description="Heartbeat timeout, after which a process is considered dead and the others exit with an error",
    )

    @field_validator("heartbeat_timeout")
    @classmethod
    def _whole_seconds(cls, value: timedelta) -> timedelta:
        if value < timedelta(seconds=1):
            raise ValueError("expected at least 1s")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "DistributedConfig":
        if self.process_id is not None and self.num_processes is None:
            raise field_error("process_id", "requires num_processes")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise field_error("process_id", f"expected 0 to {self.num_processes - 1} (num_processes - 1)")
        return self


class RayConfig(Section):
    """Ray cluster on which `lmtrain preprocess` tokenizes."""

    address: str | None = execution(
        None, description="Address of an existing Ray cluster; null: RAY_ADDRESS, else none"
    )
    start_workers: bool = execution(True, description="Add the hosts of this run to the cluster as workers")
    auto_start_cluster: bool = execution(True, description="Start a cluster on the hosts of this run if none exists")


_DTYPES = {"f32": "float32", "float32": "float32", "full": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_FP16 = {"f16", "float16", "half"}
_PARTS = {"p": "params", "params": "params", "c": "compute", "compute": "compute", "o": "output", "output": "output",
          "q": "products", "products": "products"}  # fmt: skip
# Formats of products, with the names of torchtitan and MaxText.
_FORMATS = {"fp8": "fp8", "float8": "fp8", "fp8_full": "fp8", "int8": "int8"}
_OUTPUT = "the output dtype cannot be set: logits have the dtype of the computation (c), and the loss is float32"


@dataclass(frozen=True)
class Precision:
    """Dtype names: `params` for parameters and first moments, `compute` for the computation.

    Averages of squared gradients and of the parameters are float32: they move by less than bfloat16 represents.
    Logits have the compute dtype; softmax, loss and all sums over tokens are float32. `products`: the 8-bit format of
    the blocks' products in training, fp8 or int8; None: the compute dtype.
    """

    params: str
    compute: str
    products: str | None = None

    def __str__(self) -> str:
        products = f", products={self.products}" if self.products else ""
        return f"params={self.params}, compute={self.compute}{products}"


def parse_precision(text: str) -> Precision:
    """Parse `f32`, `bf16`, or a list such as `p=f32,c=bfloat16,q=fp8`.

    Defaults: params f32, compute as params. Raises ValueError for any other syntax. The output dtype of jmp, `o=`, must
    be equal to the compute dtype.
    """
    given: dict[str, str] = {}
    for item in text.split(",") if "=" in text else [f"p={text}"]:
        name, equals, dtype = item.partition("=")
        if not equals:
            raise ValueError(f"in {text!r}: {item.strip()!r} has no dtype; expected for example c=bfloat16")
        part = _PARTS.get(name.strip())
        if part is None:
            raise ValueError(
                f"in {text!r}: unknown name {name.strip()!r}; expected p (params), c (compute) or q (products)"
            )
        if part in given:
            raise ValueError(f"in {text!r}: {part} is set twice")
        given[part] = _format(dtype) if part == "products" else _dtype(dtype)
    params = given.get("params", "float32")
    compute = given.get("compute", params)
    if given.get("output", compute) != compute:
        raise ValueError(f"in {text!r}: {_OUTPUT}; remove o")
    return Precision(params, compute, given.get("products"))


def _format(name: str) -> str:
    name = name.strip()
    if name not in _FORMATS:
        raise ValueError(f"unknown format of products q={name}; expected fp8 or int8, or remove q for those of c")
    return _FORMATS[name]


def _dtype(name: str) -> str:
    name = name.strip()
    if name in _FP16:
        raise ValueError("float16 needs loss scaling, which is unsupported; use bf16 (p=f32,c=bfloat16)")
    if name in _FORMATS:
        raise ValueError(f"{name} is a format of products only; write p=f32,c=bfloat16,q={_FORMATS[name]}")
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}; expected f32 or bf16, or a list such as p=f32,c=bfloat16")
    return _DTYPES[name]
