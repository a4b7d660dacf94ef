"""Several processes of one run on this machine, with four devices in all."""

import json
import socket
from pathlib import Path

from forked import Forked, fake_devices

DEVICES = 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_processes(script: Path, count: int, folder: Path, *arguments: object) -> list[tuple[int, str, object]]:
    """Run `script OUTPUT PROCESS COUNT PORT ARGUMENT...` as `count` processes.

    -> of each its exit code, its output, and the JSON that it wrote to OUTPUT, or None
    """
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
    try:
        for process in running:
            process.wait(timeout=240)
    finally:
        for process in running:
            process.kill()
            process.wait()
    texts = [process.output.read_text() for process in running]
    found = [json.loads(output.read_text()) if output.exists() else None for output in outputs]
    return [(process.returncode, text, result) for process, text, result in zip(running, texts, found, strict=True)]


def finished(script: Path, count: int, folder: Path, *arguments: object) -> list:
    """The JSON of each process; all must exit with 0."""
    ended = run_processes(script, count, folder, *arguments)
    assert [code for code, _, _ in ended] == [0] * count, [text for _, text, _ in ended]
    return [result for _, _, result in ended]
