"""For the scripts of `run_processes`, which have the environment that they are started with: conftest changes it."""

import sys

from lmtrain.run.execution import DistributedConfig
from lmtrain.runtime.distributed import start_processes


def join_processes() -> tuple[str, list[str]]:
    """In a script of `run_processes`: meet the other processes. -> OUTPUT, ARGUMENTS"""
    output, process, count, port, *arguments = sys.argv[1:]
    place = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": int(count), "process_id": int(process)}
    processes = start_processes(DistributedConfig(**(place if count != "1" else {})))
    assert (processes.index, processes.count) == (int(process), int(count))
    return output, arguments
