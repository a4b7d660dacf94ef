"""A process that exports again and again, each time in a forked process that is killed.

For each line `FOLDER N` on stdin it prints the id of the forked process, and then its exit code. The forked process
kills itself before the N-th change of local files below FOLDER, which Python reports to the audit hook. Exports to URLs
are killed by the test. The arguments are modules to import once, before the forks.
"""

import importlib
import os
import signal
import sys

import numpy as np

from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.key_map import Piece, Row
from lmtrain.weights.export_folder import ModelOrigin
from lmtrain.weights.write_export import Export, write_export

ORIGIN = ModelOrigin("run", "data")
_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def export_step_4(folder: str, value: float) -> None:
    """An export of few files: weights and settings."""
    pieces = [Piece(name="a", shape=(2, 3), rows=(Row("a", "a"),), index=None)]
    export = Export(
        pieces=pieces,
        config={"model_type": "gpt2"},
        extra_files={},
        tokenizer=open_tokenizer("passthrough", 100),
        dtype="float32",
        origin=ORIGIN,
    )
    write_export(f"{folder}/step-4", export, [np.full((2, 3), value, np.float32)])


def _kill_before_change(folder: str, left: int) -> None:
    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in _CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if os.fspath(arguments[0]).startswith(folder):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        where, number = line.split()
        process = os.fork()
        if process == 0:
            _kill_before_change(where, int(number))
            export_step_4(where, 2.0)
            os._exit(0)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
