"""Settings of partitioning, and the parameter and compute mappings from logical axes to mesh axes."""

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lmtrain.config.section import Section, execution
from lmtrain.runtime.errors import field_error, suggest_name
from lmtrain.sharding.axes import ACTIVATION_AXES, ACTIVATION_OF, MESH_AXES, PARAMETER_AXES, USER_AXES, as_names

# Logical axis -> one or several mesh axes; null: not split.
AxisResources = dict[str, str | Annotated[list[str], Field(min_length=1)] | None]

# Logical axis -> mesh axes that it is split over; empty: not split.
Mapping = dict[str, tuple[str, ...]]


class PartitioningConfig(Section):
    """Sharding of model and batch over devices."""

    batch_axis: Literal["batch"] = execution(
        "batch", description="Logical axis split over the replica and data axes of the mesh"
    )
    fsdp_axis: str | list[str] | None = execution(
        "embed",
        description="FSDP: logical axis or axes of parameters split over the data and context axes and gathered when "
        "used; null: off",
    )
    tensor_parallel_axes: str | list[str] | None = execution(
        None,
        description="Tensor parallelism: logical axis or axes of parameters and activations split over the model axis; "
        "[mlp, heads, vocab] splits all work. heads implies kv_heads, unless axis_resources sets it",
    )
    model_axis_size: int = execution(1, ge=1, description="Tensor-parallel size: devices along the model axis")
    replica_ici_axis_size: int = execution(
        1,
        ge=1,
        description="Number of model replicas within a slice, or in all with replica_dcn_axis_size 1; each is split "
        "over the other devices (HSDP)",
    )
    replica_dcn_axis_size: int | Literal["auto"] = execution(
        "auto",
        description="Number of model replicas over slices or hosts of GPUs, on the slow network (DCN). -1: one in "
        "each; 1: FSDP across all; auto: one in each if its state fits, else 1",
    )
    expert_axis_size: int | Literal["auto"] = execution(
        "auto",
        description="Expert parallelism: devices that split the experts of a mixture, and exchange tokens. 1: FSDP "
        "splits experts as other parameters; auto: what sends less over the slow network, 1 within a slice or host",
    )
    context_axis_size: int = execution(
        1,
        ge=1,
        description="Context parallelism: devices that split every sequence, for long sequences; model.seq_len is a "
        "multiple of it",
    )
    axis_resources: AxisResources = execution(
        {}, description="Mapping of logical axis to mesh axis or axes (null: not split), for parameters and computation"
    )
    parameter_axis_resources: AxisResources = execution(
        {}, description="Mapping as axis_resources, for parameters and optimizer state only; overrides it"
    )
    compute_axis_resources: AxisResources = execution(
        {}, description="Mapping as axis_resources, for computation only; overrides it"
    )

    @field_validator("fsdp_axis", "tensor_parallel_axes")
    @classmethod
    def _known_axes(cls, value: str | list[str] | None) -> str | list[str] | None:
        for axis in as_names(value):
            if axis not in PARAMETER_AXES:
                raise ValueError(_unknown("logical", axis, PARAMETER_AXES))
        return value

    @field_validator("expert_axis_size", "replica_dcn_axis_size")
    @classmethod
    def _one_or_more(cls, value: int | str, info: ValidationInfo) -> int | str:
        if isinstance(value, int) and value < 1 and (info.field_name, value) != ("replica_dcn_axis_size", -1):
            raise ValueError("expected auto, or 1 or more; for replica_dcn_axis_size also -1")
        return value

    @field_validator("axis_resources", "parameter_axis_resources", "compute_axis_resources")
    @classmethod
    def _known_words(cls, value: AxisResources) -> AxisResources:
        for axis, mesh_axes in value.items():
            if axis not in USER_AXES:
                raise ValueError(_unknown("logical", axis, USER_AXES))
            for mesh_axis in as_names(mesh_axes):
                if mesh_axis not in MESH_AXES:
                    raise ValueError(_unknown("mesh", mesh_axis, MESH_AXES))
                if as_names(mesh_axes).count(mesh_axis) > 1:
                    raise ValueError(f"{axis!r} names {mesh_axis!r} twice")
        return value

    @model_validator(mode="after")
    def _axis_split_once(self) -> "PartitioningConfig":
        fsdp, tensor = as_names(self.fsdp_axis), as_names(self.tensor_parallel_axes)
        for axis in tensor:
            if axis in fsdp:
                raise field_error(
                    "tensor_parallel_axes", f"{axis!r} is already split by fsdp_axis; remove it from one of them"
                )
        # a mapping overrides the default of fsdp_axis; two explicitly set values that differ are an error
        written: list[tuple[str, str, tuple[str, ...]]] = []
        written += [(axis, "fsdp_axis", self._fsdp) for axis in fsdp if "fsdp_axis" in self.model_fields_set]
        written += [(axis, "tensor_parallel_axes", ("model",)) for axis in tensor]
        for axis, setting, mesh_axes in written:
            rival = "parameter_axis_resources" if setting == "fsdp_axis" else "compute_axis_resources"
            for name in ("axis_resources", rival):
                others = tuple(name for name in mesh_axes if name != "expert")
                if axis in (given := getattr(self, name)) and as_names(given[axis]) not in (mesh_axes, others):
                    raise field_error(
                        name,
                        f"maps {axis!r} to {given[axis]!r}, but {setting} splits it over {' and '.join(mesh_axes)}; "
                        "remove one",
                    )
        return self

    @model_validator(mode="after")
    def _batch_shares_no_devices(self) -> "PartitioningConfig":
        if "batch" in self.parameter_axis_resources:
            raise field_error("parameter_axis_resources", "parameters have no axis 'batch', only activations do")
        compute = self.compute_mapping
        if self.context_axis_size > 1 and "context" not in compute["act_seq"]:
            raise field_error(
                "context_axis_size", "has no effect, since a mapping splits 'position' otherwise; remove one of the two"
            )
        for name in ("axis_resources", "compute_axis_resources"):
            for axis in getattr(self, name):
                both = set(compute.get(ACTIVATION_OF.get(axis, ""), ())) & set(compute["act_batch"])
                if both and axis != "batch":
                    raise field_error(
                        name,
                        f"splits {axis!r} over {min(both)}, which already splits the batch; use "
                        "parameter_axis_resources to split only parameters at rest, or another mesh axis",
                    )
        return self

    @property
    def parameter_mapping(self) -> Mapping:
        """Mapping of parameters and optimizer state: FSDP, axis_resources, tensor parallelism, then the override."""
        mapping: Mapping = dict.fromkeys(PARAMETER_AXES, ())
        mapping |= dict.fromkeys(as_names(self.fsdp_axis), self._fsdp)
        mapping |= {axis: as_names(value) for axis, value in self.axis_resources.items() if axis != "batch"}
        mapping |= dict.fromkeys(self._tensor_axes, ("model",))
        mapping |= {axis: as_names(value) for axis, value in self.parameter_axis_resources.items()}
        given = self.axis_resources | self.parameter_axis_resources
        if "latent" not in given:  # inputs of a matrix, too
            mapping["latent"] = mapping["embed"]
        # matrices of experts are split as others, but for the devices that split the experts
        if "expert" not in given:
            mapping["expert"] = ("expert",)
        for axis in ("embed", "mlp"):
            if f"expert_{axis}" not in given:
                mapping[f"expert_{axis}"] = tuple(name for name in mapping[axis] if name not in mapping["expert"])
        return mapping

    @property
    def compute_mapping(self) -> Mapping:
        """Mapping of activations (`act_*`): the batch, axis_resources, tensor parallelism, then the override."""
        mapping: Mapping = dict.fromkeys(ACTIVATION_AXES, ())
        given: Mapping = {"batch": ("replica", "data", "expert"), "position": self._context}
        given |= {axis: as_names(value) for axis, value in self.axis_resources.items()}
        given |= dict.fromkeys(self._tensor_axes, ("model",))
        given |= {axis: as_names(value) for axis, value in self.compute_axis_resources.items()}
        mapping |= {ACTIVATION_OF[axis]: value for axis, value in given.items() if axis in ACTIVATION_OF}
        # Sequence parallelism: the mesh axis that splits the work in the blocks splits the residual stream between them
        # along the sequence. Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
        positions, work = mapping["act_seq"], mapping["act_mlp"] or mapping["act_heads"]
        stream = positions + tuple(name for name in work if name not in positions)
        return mapping | {"act_stream": () if set(stream) & set(mapping["act_embed"]) else stream}

    @property
    def sequence_parts(self) -> int:
        """Number of devices that split a sequence in computation."""
        sizes = dict.fromkeys(MESH_AXES, 1) | {"context": self.context_axis_size, "model": self.model_axis_size}
        return math.prod(sizes[name] for name in self.compute_mapping["act_seq"])

    @property
    def head_parts(self) -> int:
        """Number of devices that split the attention heads in computation."""
        return self.model_axis_size if "model" in self.compute_mapping["act_heads"] else 1

    @property
    def _fsdp(self) -> tuple[str, ...]:
        """The mesh axes that FSDP splits parameters over."""
        return ("data", "expert", *self._context)

    @property
    def _context(self) -> tuple[str, ...]:
        return ("context",) if self.context_axis_size > 1 else ()

    @property
    def _tensor_axes(self) -> tuple[str, ...]:
        """Tensor-parallel axes. `heads` implies `kv_heads`: otherwise each device would compute all keys and values."""
        axes = as_names(self.tensor_parallel_axes)
        implied = "heads" in axes and "kv_heads" not in [*axes, *self.axis_resources, *as_names(self.fsdp_axis)]
        return (*axes, "kv_heads") if implied else axes


def _unknown(kind: str, axis: str, known: Iterable[str]) -> str:
    listed = list(known)
    hint = suggest_name(axis, listed)
    return f"unknown {kind} axis {axis!r}; " + (f"did you mean {hint!r}?" if hint else f"one of {', '.join(listed)}")
