"""Runs the points of a ladder one after the other, each as `lmtrain train` in a process of its own; or writes their
commands and Slurm jobs.

A ladder keeps no state but the logs and checkpoints of its runs, so that it can be killed at any moment: started again,
it resumes the run that was interrupted.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from lmtrain.runtime.errors import RunError, UserError, counted
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StopRequest
from lmtrain.runtime.storage import fill_run_id, write_atomically
from lmtrain.scaling.config import as_command
from lmtrain.scaling.describe import rate_lines
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.points import Point, arguments_of, trials
from lmtrain.scaling.results import (
    Result,
    Results,
    check,
    check_existing,
    is_complete,
    read_result,
    read_results,
    stages,
)

_MORE = "# Run `lmtrain scaling run` again when these are done: the other runs use the best of these learning rates."


def shell_lines(stages: Sequence[Sequence[Sequence[str]]], more: bool) -> list[str]:
    """The commands of all stages, each with a comment before it; `more` if others follow that are not known yet."""
    lines = []
    for number, stage in enumerate(stages):
        lines.append(f"# {'These runs need no others.' if number == 0 else 'These need the runs above.'}")
        lines += [as_command(arguments) for arguments in stage]
    return lines + ([_MORE] if more else [])


def write_arrays(folder: str, name: str, stages: Sequence[Sequence[Sequence[str]]], more: bool) -> str:
    """Write a file of commands for each stage, and a script that submits them as arrays. -> its path

    A stage starts when all runs of the stage before it have ended well. Raises `UserError` if writing fails.
    """
    lines = ["#!/usr/bin/env bash", f"# Submits the runs of {name}; arguments are options of sbatch."]
    if more:
        lines.append(_MORE)
    lines += ["set -euo pipefail", 'after=""']
    with remote_errors(f"--slurm {folder}", "written"):
        os.makedirs(folder, exist_ok=True)
        for old in os.listdir(folder):
            if old.endswith(".commands"):
                os.remove(os.path.join(folder, old))
        for number, stage in enumerate(stages, 1):
            path = os.path.join(folder, f"{number}.commands")
            write_atomically(path, "".join(f"{shlex.join(arguments)}\n" for arguments in stage).encode())
            lines.append(
                f'after=$(sbatch --parsable "$@" ${{after:+"--dependency=afterok:${{after%%;*}}"}} '
                f'--array=1-{len(stage)} "${{REPOSITORY:-.}}/deploy/slurm/array.sbatch" {shlex.quote(path)})'
            )
            lines.append(f'echo "array $after: {counted(len(stage), "run")}"')
        script = os.path.join(folder, "submit.sh")
        write_atomically(script, ("\n".join(lines) + "\n").encode())
    return script


# `lmtrain train`, which ends at once if the ladder is killed: no run is left behind that holds its folder. Its
# arguments come from a pipe, as other users see command lines, and these may have secrets.
_TRAIN = """
import json, sys
from lmtrain.runtime.signals import end_at_once
end_at_once()
from lmtrain.runtime.machine import end_with_parent
end_with_parent(int(sys.argv.pop(1)))
from lmtrain.cli import main
sys.argv[1:] = json.load(sys.stdin)
main()
"""
_POLL_SECONDS = 0.2


def train_all(ladder: Ladder, data_is_enough: Callable[[], bool]) -> int:
    """Train all runs that are not done. -> exit code of the command

    `data_is_enough` is asked before each run until it is true: it is false as long as the cache is being built, and
    raises `UserError` if a run would repeat its data.

    Raises `UserError` if a run refuses its settings, and `RunError` if one fails.
    """
    is_enough, tried = False, {trial.id for trial in trials(ladder)}
    said: set[str] = set()
    check_existing(ladder)
    while left := remaining(ladder, check(read_results(ladder))):
        _say_rates(ladder, said)
        for number, point in enumerate(left):
            is_enough = is_enough or data_is_enough()
            check_start(ladder, point)
            more = len(left) - number - 1
            then = f", then {counted(more, 'run')}" if more else ""
            print(f"{ladder.name}: {point.id}{then}", file=sys.stderr, flush=True)
            code = _train(ladder, point)
            if code == STOPPED_BY_SIGNAL:
                print(f"{ladder.name}: stopped; run the same command again to resume", file=sys.stderr, flush=True)
                return code
            _check_done(ladder, read_result(ladder, point), point.id in tried, code)
            if point.id in tried:
                _say_rates(ladder, said)
    return 0


def _say_rates(ladder: Ladder, said: set[str]) -> None:
    """Print the best learning rates once they are known, while the ladder can still be stopped and others be added."""
    for line in rate_lines(ladder, read_results(ladder)):
        if line not in said:
            said.add(line)
            print(f"{ladder.name}: {line}", file=sys.stderr, flush=True)


def remaining(ladder: Ladder, results: Results) -> list[Point]:
    """The runs that are not done, in order. Raises `UserError` if one branches off from a run that is done, and the
    checkpoint is missing."""
    left = [point for stage in stages(results) for point in stage]
    ids = {point.id for point in left}
    for point in left:
        if point.parent not in ids:
            check_start(ladder, point)
    return left


def _check_done(ladder: Ladder, result: Result, is_trial: bool, code: int) -> None:
    if result.state == "diverged":
        said = f"{result.point.id} has diverged"
        if not is_trial:
            raise RunError(f"{said}; add lower learning_rates to the ladder, or lengthen optimizer.warmup")
        print(f"{ladder.name}: {said}: its learning rate is too high", file=sys.stderr, flush=True)
    elif code == 2:
        raise UserError(f"{result.point.id} was refused; see above")
    elif code:
        raise RunError(f"{result.point.id} failed with exit code {code}; run the same command again to resume")
    elif result.state == "not saved":
        raise RunError(f"{result.point.id} was not saved after its last step; run the same command again to resume")
    elif result.state != "done":
        trainer = ladder.run.trainer
        raise UserError(
            f"{result.point.id} has all steps, but its log in {fill_run_id(trainer.log_dir, result.point.id)} has no "
            f"eval/loss of step {result.point.steps:,}. If the log was lost, remove "
            f"{trainer.checkpointer.run_folder(result.point.id)} to train this run again; several hosts need a shared "
            "trainer.log_dir"
        )


def check_start(ladder: Ladder, point: Point) -> None:
    """Raise `UserError` if the checkpoint from which a run branches off is missing or not complete."""
    folder = point.settings.get("trainer.initialize_from", "")
    if folder and not is_complete(folder):
        trainer, parent = ladder.run.trainer, str(point.parent)
        raise UserError(
            f"{point.id} starts from {folder}, which is no complete checkpoint: {parent} was trained without this "
            f"length, its save failed, or its checkpoints were removed. Remove "
            f"{trainer.checkpointer.run_folder(parent)} and its log in {fill_run_id(trainer.log_dir, parent)} to train "
            "it again"
        )


def _train(ladder: Ladder, point: Point) -> int:
    """Train one run. -> its exit code"""
    command = [sys.executable, "-c", _TRAIN, str(os.getpid())]
    with StopRequest("stopping the current run") as stop:
        # in a session of its own, so that Ctrl-C reaches it once, through this process
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its exit code says why it has ended
            pipe.write(json.dumps(arguments_of(ladder, point)).encode())
        forwarded = False
        for code in _poll(process):
            if code is not None:
                return code if not stop.requested or code == 0 else STOPPED_BY_SIGNAL
            if stop.requested and not forwarded:
                forwarded = True
                process.send_signal(signal.SIGTERM)
    raise AssertionError("a process that is polled ends")


def _poll(process: "subprocess.Popen[bytes]") -> Iterator[int | None]:
    """The exit code, or None each time that it is still running."""
    while True:
        try:
            yield process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            yield None
