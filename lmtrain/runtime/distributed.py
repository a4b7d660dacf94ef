"""Meeting the other processes of a run: found by JAX's own detection, or named in `trainer.distributed`.

The only file of this room that imports JAX, and only for a run of several processes.
"""

import os
from collections.abc import Mapping

from lmtrain.config.errors import UserError
from lmtrain.runtime.config import DistributedConfig
from lmtrain.runtime.processes import Processes

# What job starters set for each of several processes; JAX knows the rest.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JAX_NUM_PROCESSES")
_LISTS = ("TPU_WORKER_HOSTNAMES",)


def start_processes(config: DistributedConfig) -> Processes:
    """Meet the other processes of the run, if it has any. Must come before anything that touches devices.

    Raises `UserError` if they do not find one another.
    """
    if all(value is None for value in dict(config).values()) and not detects_others(os.environ):
        return Processes()
    import jax
    from jax._src import distributed  # the public module does not tell who and how many they are

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of no effect where there are other devices
    ids = config.local_device_ids
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator_address,
            num_processes=config.num_processes,
            process_id=config.process_id,
            local_device_ids=[ids] if isinstance(ids, int) else ids,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"trainer.distributed: the processes did not meet: {str(error).splitlines()[0]}") from None
    state = distributed.global_state
    return Processes(state.process_id, state.num_processes or 1, state.coordinator_address)


def detects_others(environment: Mapping[str, str]) -> bool:
    """Whether a job starter says that this is one process of several."""
    counts = [environment.get(name, "") for name in _COUNTS]
    lists = [environment.get(name, "") for name in _LISTS]
    return any(count.isdigit() and int(count) > 1 for count in counts) or any("," in names for names in lists)
