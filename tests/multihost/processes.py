"""Several processes of one run on this machine, with four devices in all."""

import json
from pathlib import Path

from faults.runs import start
from forked import Forked, ended, fake_devices
from servers import free_ports

DEVICES = 4


def meeting_place(number: int, count: int, port: int) -> list[str]:
    """The flags of process `number` of a run of several; none for a run of one."""
    meet = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": count, "process_id": number}
    return [f"--trainer.distributed.{name}={value}" for name, value in meet.items() if count > 1]


def start_run(
    folder: Path, run: str, count: int, *flags: object, devices: int | None = None, **environment: str
) -> list[Forked]:
    """The processes of a run, each with `devices`, with output to `<run>.<number>.txt`."""
    (port,) = free_ports(1)
    environment["XLA_FLAGS"] = fake_devices(devices or DEVICES // count)
    places = (meeting_place(number, count, port) for number in range(count))
    return [
        start(folder, *place, *flags, run=run, output=f"{run}.{number}.txt", **environment)
        for number, place in enumerate(places)
    ]


def run_processes(script: Path, count: int, folder: Path, *arguments: object) -> list[dict]:
    """Run `script OUTPUT PROCESS COUNT PORT ARGUMENT...` as `count` processes. -> the JSON that each wrote to OUTPUT"""
    (port,) = free_ports(1)
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
    with ended(*running):
        codes = [process.wait(timeout=240) for process in running]
    assert codes == [0] * count, [process.output.read_text() for process in running]
    return [json.loads(output.read_text()) for output in outputs]
