"""Settings of multi-process runs, and of preprocessing on a Ray cluster."""

from datetime import timedelta
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from lmtrain.config.durations import Duration
from lmtrain.config.errors import field_error
from lmtrain.config.section import Section
from lmtrain.config.setting import execution

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
