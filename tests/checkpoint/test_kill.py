"""A run resumes from its folder after its process was killed at any moment of a save."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.checkpoint.arrays import load_arrays
from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind

# For each folder on stdin, saves step 2 in a forked process, which is killed before its N-th change of the folder:
# Python reports each change to the audit hook. Prints the exit code of each process.
PROGRAM = """
import os, signal, sys, threading
import jax.numpy as jnp  # before the fork, which would take seconds otherwise; it initializes no device
from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.checkpoint.config import Kind

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.ftruncate", "shutil.rmtree"}

def save(folder, last, log):
    left, one_at_a_time = last, threading.Lock()  # several threads change the folder

    def audit(event, arguments):
        nonlocal left
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if not os.fspath(arguments[0]).startswith(folder):
            return
        with one_at_a_time:
            left -= 1
            os.write(log, f"{event} {os.fspath(arguments[0]).removeprefix(folder)}\\n".encode())
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    checkpointer = Checkpointer(folder, CheckpointerConfig())
    checkpointer.save(2, Kind.TEMPORARY, {"params": {"w": jnp.full(10, 2.0)}}, {})
    checkpointer.close()

for line in sys.stdin:
    last, folder = line.rstrip("\\n").split(" ", 1)
    process = os.fork()
    if process == 0:
        save(folder, int(last), os.open(folder + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""

# The changes that define the stages, in order; there are many more in between.
SAVING = [
    "open /step-2.partial",
    "os.rename /step-2.orbax-checkpoint-tmp",
    "os.rename /step-2/manifest.json",
    "os.remove /step-2.partial",
]
DELETING = ["os.remove /step-1/manifest.json", "shutil.rmtree /step-1", "os.rmdir /step-1", "os.remove /step-1.partial"]
CLEANING = [
    "shutil.rmtree /step-2",
    "shutil.rmtree /step-2.orbax-checkpoint-tmp",
    "os.remove /step-2.partial",
    "os.rename /step-0",
]
STAGES = {
    "first save": SAVING,
    "second save": SAVING + DELETING,
    "start after a kill": CLEANING + SAVING[1:3] + DELETING,
}


def save(run: Path, step: int) -> None:
    checkpointer = Checkpointer(str(run), CheckpointerConfig())
    checkpointer.save_now(step, Kind.TEMPORARY, {"params": {"w": jnp.full(10, float(step))}}, {})
    checkpointer.close()


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("first save", "start after a kill")]


@pytest.fixture(scope="module", params=["second save", *LONG])
def killed(request, tmp_path_factory) -> dict[str, Path]:
    """Folders of killed runs, by the first change of the folder that did not happen."""
    place = tmp_path_factory.mktemp("killed")
    (place / "before").mkdir()
    if request.param != "first save":
        save(place / "before", 1)
    if request.param == "start after a kill":
        for name in ("step-2", "step-2.orbax-checkpoint-tmp", "step-0"):
            shutil.copytree(place / "before" / "step-1" / "params", place / "before" / name / "params")
        (place / "before" / "step-2.partial").touch()
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    folders = {}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], text=True, **pipes) as process:
        ended = -9
        while ended == -9:
            run = place / f"run {len(folders) + 1}"
            shutil.copytree(place / "before", run)
            process.stdin.write(f"{len(folders) + 1} {run}\n")
            process.stdin.flush()
            ended = int(process.stdout.readline())
            done = Path(f"{run}.log").read_text().splitlines()
            folders[f"{len(folders) + 1}: {done[-1]}" if ended else "the end"] = run
    assert ended == 0
    # every stage occurred, in this order
    left = iter(done)
    assert [stage for stage in STAGES[request.param] if not any(change.startswith(stage) for change in left)] == []
    assert len(folders) == len(done) + 1
    return folders


def test_the_run_resumes_from_a_complete_checkpoint_and_has_no_partial_ones(killed, tmp_path):
    """It is the previous or the new checkpoint, with the arrays of that step."""
    seen = set()
    for moment, run in killed.items():
        run = Path(shutil.copytree(run, tmp_path / run.name))
        had_one = (run / "step-1").exists()
        checkpointer = Checkpointer(str(run), CheckpointerConfig())
        kept = {"step-1", "step-2", "damaged-step-0", "lock", "attempt.json"}
        assert set(os.listdir(run)) <= kept, moment  # no temporary files of the killed process
        newest = checkpointer.newest()
        seen.add(newest and newest.step)
        assert newest is not None or not had_one, moment
        if newest is not None:
            target = {"w": jax.ShapeDtypeStruct((10,), np.float32, sharding=jnp.zeros(1).sharding)}
            np.testing.assert_array_equal(load_arrays(newest.path, "params", target)["w"], newest.step, moment)
        checkpointer.save_now(3, Kind.PERMANENT, {"params": {"w": jnp.zeros(10)}}, {})
        assert [name for name in os.listdir(run) if name.startswith("step-") and ".tmp-" not in name] == ["step-3"]
        checkpointer.close()
    assert 2 in seen
    assert len(seen) == 2
