"""Several processes of one run on this machine, with four devices in all."""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked import Forked, fake_devices

from lmtrain.run.execution import DistributedConfig
from lmtrain.runtime.distributed import start_processes

DEVICES = 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def meeting_place(number: int, count: int, port: int) -> list[str]:
    """The flags of process `number` of a run of several; none for a run of one."""
    meet = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": count, "process_id": number}
    return [f"--trainer.distributed.{name}={value}" for name, value in meet.items() if count > 1]


def start_run(
    folder: Path, run: str, count: int, *flags: object, devices: int | None = None, **environment: str
) -> list[Forked]:
    """The processes of a run, each with `devices`, with output to `<run>.<number>.txt`."""
    port, here = free_port(), fake_devices(devices or DEVICES // count)
    running = []
    for number in range(count):
        arguments = ["train", "tiny.json", "--trainer.id", run, *meeting_place(number, count, port), *flags]
        running.append(Forked(arguments, folder, folder / f"{run}.{number}.txt", XLA_FLAGS=here, **environment))
    return running


@contextmanager
def killed_at_the_end(processes: list[Forked]) -> Iterator[list[Forked]]:
    """The processes, of which none is left afterwards."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def join_processes() -> tuple[str, list[str]]:
    """In a script of `run_processes`: meet the other processes. -> OUTPUT, ARGUMENTS"""
    output, process, count, port, *arguments = sys.argv[1:]
    place = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": int(count), "process_id": int(process)}
    processes = start_processes(DistributedConfig(**(place if count != "1" else {})))
    assert (processes.index, processes.count) == (int(process), int(count))
    return output, arguments


def run_processes(script: Path, count: int, folder: Path, *arguments: object) -> list[dict]:
    """Run `script OUTPUT PROCESS COUNT PORT ARGUMENT...` as `count` processes. -> the JSON that each wrote to OUTPUT"""
    port = free_port()
    outputs = [folder / f"{count}-{number}.json" for number in range(count)]
    running = [
        Forked(
            (output, number, count, port, *arguments),
            folder,
            output.with_suffix(".txt"),
            script.read_text(),
            XLA_FLAGS=fake_devices(DEVICES // count),
        )
        for number, output in enumerate(outputs)
    ]
    with killed_at_the_end(running):
        codes = [process.wait(timeout=240) for process in running]
    assert codes == [0] * count, [process.output.read_text() for process in running]
    return [json.loads(output.read_text()) for output in outputs]
