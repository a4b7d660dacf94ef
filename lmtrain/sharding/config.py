"""Settings of partitioning: what is split over which devices."""

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from lmtrain.config.base import Section, planned
from lmtrain.config.errors import field_error
from lmtrain.config.suggest import suggest_name
from lmtrain.sharding.axes import MESH_AXES, PARAMETER_AXES, USER_AXES

# Logical axis -> one axis of the mesh or several; null: not split.
AxisResources = dict[str, str | Annotated[list[str], Field(min_length=1)] | None]


class PartitioningConfig(Section):
    """How model and batch are split over devices."""

    batch_axis: str = Field("batch", description="Logical axis split over the replica and data axes of the mesh")
    fsdp_axis: str | list[str] | None = Field(
        "embed", description="Logical axis or axes of parameters split over the data axis, gathered when used"
    )
    tensor_parallel_axes: str | list[str] | None = Field(
        None, description="Logical axis or axes split over the model axis, of parameters and activations"
    )
    model_axis_size: int = Field(1, ge=1, description="Devices of the model axis (tensor parallelism)")
    replica_ici_axis_size: int = planned(1, ge=1, description="Copies of the model within a slice")
    replica_dcn_axis_size: int = planned(
        1, ge=-1, description="Copies of the model over slices, joined by the slow network; -1: one for each slice"
    )
    axis_resources: AxisResources = planned(
        {}, description="Logical axis to mesh axis or axes, for parameters and computation"
    )
    parameter_axis_resources: AxisResources = planned(
        {}, description="Logical axis to mesh axis or axes, for parameters and optimizer state"
    )
    compute_axis_resources: AxisResources = planned(
        {}, description="Logical axis to mesh axis or axes, for computation"
    )

    @field_validator("batch_axis")
    @classmethod
    def _batch_is_batch(cls, value: str) -> str:
        if value != "batch":
            raise ValueError(f"only 'batch' is an axis of the data, not {value!r}")
        return value

    @field_validator("fsdp_axis", "tensor_parallel_axes")
    @classmethod
    def _known_axes(cls, value: str | list[str] | None) -> str | list[str] | None:
        for axis in names(value):
            if axis not in PARAMETER_AXES:
                raise ValueError(_unknown("logical", axis, PARAMETER_AXES))
        return value

    @field_validator("replica_dcn_axis_size")
    @classmethod
    def _one_or_more_or_auto(cls, value: int) -> int:
        if value == 0:
            raise ValueError("expected -1 (one for each slice), or 1 or more")
        return value

    @field_validator("axis_resources", "parameter_axis_resources", "compute_axis_resources")
    @classmethod
    def _known_words(cls, value: AxisResources) -> AxisResources:
        for axis, mesh_axes in value.items():
            if axis not in USER_AXES:
                raise ValueError(_unknown("logical", axis, USER_AXES))
            for mesh_axis in names(mesh_axes):
                if mesh_axis not in MESH_AXES:
                    raise ValueError(_unknown("mesh", mesh_axis, MESH_AXES))
        return value

    @model_validator(mode="after")
    def _axis_split_once(self) -> "PartitioningConfig":
        both = [axis for axis in names(self.fsdp_axis) if axis in names(self.tensor_parallel_axes)]
        if both:
            raise field_error(
                "tensor_parallel_axes", f"names {both[0]!r}, which fsdp_axis splits already; take it out of one"
            )
        return self


def names(value: str | list[str] | None) -> list[str]:
    """One, several or none, as a list."""
    return [value] if isinstance(value, str) else list(value or [])


def _unknown(kind: str, axis: str, known: object) -> str:
    listed = list(known)  # type: ignore[call-overload]  # any collection of names
    hint = suggest_name(axis, listed)
    return f"no {kind} axis {axis!r}; " + (f"did you mean {hint!r}?" if hint else f"one of {', '.join(listed)}")
