"""Runs the points of a ladder one after the other, each as `lmtrain train` in a process of its own.

A ladder keeps no state but the logs and checkpoints of its runs, so that it can be killed at any moment: started again,
it resumes the run that was interrupted.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from lmtrain.config.counts import counted
from lmtrain.config.errors import RunError, UserError
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StopRequest
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.points import Point, arguments_of
from lmtrain.scaling.results import Result, Results, read_result, read_results

# `lmtrain train`, which ends at once if the ladder is killed: no run is left behind that holds its folder.
_TRAIN = """
import os, sys
from lmtrain.runtime.signals import end_at_once
end_at_once()
from lmtrain.runtime.lost_parent import end_with_parent
end_with_parent(int(sys.argv.pop(1)))
from lmtrain.cli import main
main()
"""
_POLL_SECONDS = 0.2


def stages(results: Results) -> list[list[Point]]:
    """The runs that are not done, in stages: those of a stage need only those of earlier ones.

    The runs of the law are known after those that try learning rates.
    """
    left = [result.point for result in results.all if result.state != "done"]
    trials = {result.point.id for result in results.trials}
    tried = [point for point in left if point.id in trials]
    others = [point for point in left if point.id not in trials]
    found = [tried, [point for point in others if point.parent is None], [point for point in others if point.parent]]
    return [stage for stage in found if stage]


def train_all(ladder: Ladder, data_is_enough: Callable[[], bool]) -> int:
    """Train all runs that are not done. -> exit code of the command

    `data_is_enough` is asked before each run until it is true: it is false as long as the cache is being built, and
    raises `UserError` if a run would repeat its data.

    Raises `UserError` if a run refuses its settings, and `RunError` if one fails.
    """
    is_enough = False
    while left := [point for stage in stages(check(read_results(ladder))) for point in stage]:
        for number, point in enumerate(left):
            is_enough = is_enough or data_is_enough()
            more = counted(len(left) - number - 1, "run")
            print(f"{ladder.name}: {point.id}, then {more}", file=sys.stderr, flush=True)
            code = _train(ladder, point)
            if code == STOPPED_BY_SIGNAL:
                print(f"{ladder.name}: stopped; run the same command again to resume", file=sys.stderr, flush=True)
                return code
            _check_done(read_result(ladder, point), code)
    return 0


def check(results: Results) -> Results:
    """Raise `UserError` if a run was trained with other settings than those of the ladder."""
    for result in results.all:
        if result.differences:
            raise UserError(
                f"{result.point.id} was trained with other settings: {'; '.join(result.differences[:3])}. Restore the "
                "settings, copy the ladder to another name, or remove the log and the checkpoints of this run"
            )
    return results


def _check_done(result: Result, code: int) -> None:
    if code == 2:
        raise UserError(f"{result.point.id} was refused; see above")
    if code:
        raise RunError(f"{result.point.id} failed with exit code {code}; run the same command again to resume")
    if result.state != "done":
        raise RunError(
            f"{result.point.id} has ended without eval/loss of step {result.point.steps:,} in its log; with several "
            "hosts, trainer.log_dir must be a folder that all of them share"
        )


def _train(ladder: Ladder, point: Point) -> int:
    """Train one run. -> its exit code"""
    command = [sys.executable, "-c", _TRAIN, str(os.getpid()), *arguments_of(ladder, point)]
    with StopRequest("stopping the current run") as stop:
        # in a session of its own, so that Ctrl-C reaches it once, through this process
        process = subprocess.Popen(command, start_new_session=True)
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
