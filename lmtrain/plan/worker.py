"""Answers a request in a separate process: `python -m lmtrain.plan.worker REQUEST.json FOLDER`.

Writes into the folder `program.json`, then for each step `<step>.json` and `<step>.hlo.gz`, all atomically. A user
error is written to `error.txt` next to the request, with exit code 2; errors of the compiler go to standard error, with
exit code 1.
"""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.plan.request import Request
from lmtrain.runtime.atomic_files import write_atomically
from lmtrain.runtime.lost_parent import end_with_parent

# Parts of compilers' messages that a program does not fit.
_DOES_NOT_FIT = ("RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory", "exceeds available memory")


def main(argv: list[str]) -> int:
    """Answer one request, `argv[0]`, into the folder `argv[1]`. -> exit code"""
    end_with_parent(os.getppid())  # so that no compiler keeps using memory
    path = Path(argv[0])
    try:
        answer(Request.from_json(path.read_text()), argv[1])
    except UserError as error:
        path.with_name("error.txt").write_text(str(error))
        return 2
    return 0


def answer(request: Request, folder: str) -> None:
    """Write all figures of a request to a folder."""
    from lmtrain.plan.devices import open_devices
    from lmtrain.plan.figures import compiled_figures, describe
    from lmtrain.plan.measure import measure
    from lmtrain.runtime.accelerators import find_accelerator
    from lmtrain.runtime.xla_options import refused_option
    from lmtrain.train.program.program import build_program

    devices = open_devices(request.target, request.compile)
    topology = request.target.topology
    accelerator = topology.accelerator if topology else find_accelerator(devices[0].device_kind)
    slice_ids = topology.slice_ids if topology else None
    program = build_program(request.run_config, request.vocab_size, devices, slice_ids, accelerator)
    kind = accelerator.kind if accelerator else devices[0].device_kind
    _write(folder, "program", {"device": kind, "devices": len(devices), **describe(program, accelerator)})
    for step in request.steps if request.compile else ():
        if step == "measure":
            _write(folder, step, measure(program, accelerator))
            continue
        try:
            compiled = lower(program, step).compile()
        except Exception as error:
            if refused := refused_option(error):
                raise refused from None
            if not any(sign in str(error) for sign in _DOES_NOT_FIT):
                raise
            _write(folder, step, {"step": step, "does_not_fit": str(error)})
            continue
        text = compiled.as_text()
        write_atomically(os.path.join(folder, f"{step}.hlo.gz"), gzip.compress(text.encode(), 4), durable=False)
        _write(folder, step, compiled_figures(program, compiled, text, step, accelerator))


def lower(program: Any, step: str) -> Any:
    """The program's own training or evaluation step, lowered for its devices."""
    if step == "train":
        return program.train_step.lower(*program.example())
    from lmtrain.hf.token_bytes import TextSizes

    # lengths of tokens in bytes are constants of the program; their values do not affect its figures
    lengths = [1 + token % 7 for token in range(program.model.vocab_size)]
    return program.eval_step(TextSizes(lengths)).lower(*program.eval_example())


def _write(folder: str, name: str, content: dict[str, Any]) -> None:
    write_atomically(os.path.join(folder, f"{name}.json"), json.dumps(content).encode(), durable=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
