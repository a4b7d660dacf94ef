"""Settings of a run over several processes and machines."""

from datetime import timedelta
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from lmtrain.config.base import Section
from lmtrain.config.durations import Duration
from lmtrain.config.errors import field_error

DeviceId = Annotated[int, Field(ge=0)]


class DistributedConfig(Section):
    """How processes find one another. Leave it alone on TPU and Slurm, which JAX detects by itself."""

    coordinator_address: str | None = Field(None, description="host:port of process 0; null: detected")
    num_processes: int | None = Field(None, ge=1, description="Processes of the run; null: detected")
    process_id: int | None = Field(None, ge=0, description="Number of this process, from 0; null: detected")
    local_device_ids: DeviceId | list[DeviceId] | None = Field(
        None, description="Devices of this process; null: those of CUDA_VISIBLE_DEVICES, or all"
    )

    heartbeat_timeout: Duration = Field(
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
            raise field_error("process_id", "needs num_processes too")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise field_error("process_id", f"processes are numbered 0 to {self.num_processes - 1}")
        return self


class RayConfig(Section):
    """Where `lmtrain preprocess` finds other machines to tokenize on."""

    address: str | None = Field(None, description="Address of an existing Ray cluster; null: RAY_ADDRESS, else none")
    start_workers: bool = Field(True, description="Join the hosts of this run to the cluster as workers")
    auto_start_cluster: bool = Field(True, description="Start a cluster on the hosts of this run if there is none")
