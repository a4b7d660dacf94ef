"""Connecting the processes of a run (`jax.distributed`), by JAX's detection or by the settings `trainer.distributed`.

The only file of this package that imports JAX, and only for a run of several processes.
"""

import json
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from lmtrain.runtime.errors import RunError, UserError
from lmtrain.runtime.logging import Processes, log
from lmtrain.runtime.signals import StoppedError, StopRequest

# Environment variables that launchers set for each process: number of processes, index. JAX detects the rest.
JOB_STARTERS = {
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPI": ("PMI_SIZE", "PMI_RANK"),
    "JAX's variables": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
}

# Timeout of `gather`. A dead process is detected much earlier, by its missing heartbeat.
_GATHER_MILLISECONDS = 3_600_000
# Number of calls of `gather` by name.
_calls: Counter[str] = Counter()


class Connection(Protocol):
    """The settings `trainer.distributed`."""

    @property
    def coordinator_address(self) -> str | None: ...
    @property
    def num_processes(self) -> int | None: ...
    @property
    def process_id(self) -> int | None: ...
    @property
    def local_device_ids(self) -> int | list[int] | None: ...
    @property
    def heartbeat_timeout(self) -> timedelta: ...


def start_processes(config: Connection) -> Processes:
    """Connect to the other processes of the run, if there are any. Call it before anything that uses devices.

    Raises `UserError` if the connection fails.
    """
    named = (config.coordinator_address, config.num_processes, config.process_id, config.local_device_ids)
    is_named = named != (None,) * len(named)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > 1 and not is_named:
        raise UserError(
            f"torchrun or accelerate started {local} processes on this machine, which would be separate runs: start "
            "`lmtrain` itself, once on each machine; one process uses all devices of its machine"
        )
    if not is_named and not detects_others(os.environ):
        return Processes()
    import jax
    from jax._src import distributed  # the public module has neither index nor number of the processes

    jax.config.update("jax_enable_preemption_service", False)  # it would replace the handler of SIGTERM
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # no effect on other platforms
    ids = [config.local_device_ids] if isinstance(config.local_device_ids, int) else config.local_device_ids
    if ids is None and "JAX_LOCAL_DEVICE_IDS" not in os.environ and is_alone_on_its_node(os.environ):
        ids = []  # all devices: by default JAX gives a Slurm process one device, by its index on the node
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator_address,
            num_processes=config.num_processes,
            process_id=config.process_id,
            local_device_ids=ids,
            heartbeat_timeout_seconds=int(config.heartbeat_timeout.total_seconds()),
        )
        state = distributed.global_state
        processes = Processes(state.process_id, state.num_processes or 1, state.coordinator_address)
        # If the first process ends before another has the reply to its connection, that one tries again for five
        # minutes. After this exchange all have it, and notice at once that a process has ended.
        gather(processes, "connected", True)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"trainer.distributed: cannot connect to the other processes: {str(error).splitlines()[0]}"
        ) from None
    return processes


@contextmanager
def ending_for_all(processes: Processes) -> Iterator[None]:
    """In a run of several processes, an error in the block exits this process at once, and thereby the others.

    A normal exit of Python would wait for the other processes, which wait for this one in a collective. After the
    immediate exit they see a closed connection or a missing heartbeat: JAX says so, and aborts them. Exit code: 2 for a
    user error, else 1.
    """
    try:
        yield
    except BaseException as error:
        if processes.count == 1 or isinstance(error, SystemExit):
            raise
        if isinstance(error, UserError | RunError):
            log.error(f"lmtrain: error: {error}")
        else:
            log.error("".join(traceback.format_exception(error)).rstrip())
        log.error(
            f"process {processes.index} of {processes.count} is aborting the run. Run the same command again in all "
            "processes to resume from the last checkpoint"
        )
        logging.shutdown()
        sys.stdout.flush()
        os._exit(2 if isinstance(error, UserError) else 1)


def detects_others(environment: Mapping[str, str]) -> bool:
    """Whether a launcher's environment variables say that this is one process of several."""
    counts = [environment.get(name, "") for name, _ in JOB_STARTERS.values()]
    several = any(count.isdigit() and int(count) > 1 for count in counts)
    return several or "," in environment.get("TPU_WORKER_HOSTNAMES", "")


def is_alone_on_its_node(environment: Mapping[str, str]) -> bool:
    """Whether this is the only process of the Slurm job step on its node."""
    counts: list[int] = []
    for part in filter(None, environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):  # such as 8(x3),4
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    node = int(environment.get("SLURM_NODEID", 0))
    return node < len(counts) and counts[node] == 1


def gather(processes: Processes, name: str, value: Any) -> list[Any]:
    """The `value` (plain data) of every process, in the order of their indices. All processes have to call it.

    Calls with the same `name` must come in the same order on all processes; calls with different names need not.
    """
    if processes.count == 1:
        return [value]
    from jax._src import distributed

    number = _calls[name]
    _calls[name] += 1
    key = f"lmtrain/{name}/{number}"
    client: Any = distributed.global_state.client
    client.key_value_set(f"{key}/{processes.index}", json.dumps(value))
    values = [client.blocking_key_value_get(f"{key}/{i}", _GATHER_MILLISECONDS) for i in range(processes.count)]
    if processes.is_first and number:  # all processes are in this call, so all have read the previous values
        client.key_value_delete(f"lmtrain/{name}/{number - 1}/")
    return [json.loads(text) for text in values]


# Several processes exchange stop requests at every N-th check.
_INTERVAL = 16


class StopCheck:
    """A check for stop requests during long work between two steps: call it repeatedly, equally often in all processes.

    Raises `StoppedError` in all processes at the same call if one received a signal. A single process checks at every
    call, several at every sixteenth, through the coordinator.
    """

    def __init__(self, processes: Processes, stop: StopRequest):
        self._processes = processes
        self._stop = stop
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._processes.count > 1 and self._calls % _INTERVAL:
            return
        if any(gather(self._processes, "stop", self._stop.requested)):
            raise StoppedError
