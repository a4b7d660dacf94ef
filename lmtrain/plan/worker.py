"""Answers a request in a separate process: `python -m lmtrain.plan.worker REQUEST.json FOLDER`.

Writes `estimate.json`, then for each step `<step>.json` and `<step>.hlo.gz`, all atomically. A user error is written to
`error.txt`, with exit code 2; errors of the compiler go to standard error, with exit code 1.
"""

import gzip
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.plan.request import Request

# Parts of compilers' messages that a program does not fit.
_DOES_NOT_FIT = ("RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory", "exceeds available memory")


def main(argv: list[str]) -> int:
    """Answer one request, `argv[0]`, into the folder `argv[1]`. -> exit code"""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    request = Request.from_json(Path(argv[0]).read_text())
    folder = Path(argv[1])
    try:
        answer(request, folder)
    except UserError as error:
        write(folder / "error.txt", str(error).encode())
        return 2
    return 0


def _end_with_parent(parent: int) -> None:
    """Exit if the command was killed, so that no compiler keeps using memory."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def answer(request: Request, folder: Path) -> None:
    """Write all figures of a request to a folder."""
    from lmtrain.plan.devices import open_devices
    from lmtrain.plan.figures import compiled_figures, describe
    from lmtrain.plan.measure import measure
    from lmtrain.runtime.accelerators import find_accelerator
    from lmtrain.sharding.mesh import platform_of
    from lmtrain.train.program.program import plan_program
    from lmtrain.train.program.xla_options import refused_option

    devices = open_devices(request.target, request.compile)
    topology = request.target.topology
    accelerator = topology.accelerator if topology else find_accelerator(devices[0].device_kind)
    platform = accelerator.platform if accelerator else platform_of(devices[0])
    islands = topology.islands if topology else None
    program = plan_program(request.run_config, request.vocab_size, devices, platform, islands)
    described = describe(program, platform) | {
        "device": accelerator.kind if accelerator else devices[0].device_kind,
        "devices": len(devices),
    }
    write(folder / "estimate.json", json.dumps(described).encode())
    for step in request.steps if request.compile else ():
        if step == "measure":
            write(folder / "measure.json", json.dumps(measure(program, accelerator)).encode())
            continue
        lowered = lower(program, step)
        try:
            compiled = lowered.compile()
        except Exception as error:
            if refused := refused_option(error):
                raise refused from None
            if not any(sign in str(error) for sign in _DOES_NOT_FIT):
                raise
            write(folder / f"{step}.json", json.dumps({"step": step, "does_not_fit": str(error)}).encode())
            continue
        text = compiled.as_text()
        figures = compiled_figures(program, compiled, text, step, accelerator)
        write(folder / f"{step}.hlo.gz", gzip.compress(text.encode(), 4))
        write(folder / f"{step}.json", json.dumps(figures).encode())


def lower(program: Any, step: str) -> Any:
    """The program's own training or evaluation step, lowered for its devices."""
    if step == "train":
        return program.train_step.lower(*program.example())
    # lengths of tokens in bytes are constants of the program; their values do not affect its figures
    lengths = [1 + token % 7 for token in range(program.model.vocab_size)]
    return program.eval_step(lengths).lower(*program.eval_example())


def write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
