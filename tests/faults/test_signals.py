"""SIGTERM, SIGINT, SIGUSR1, SIGHUP at any moment, to one process or one of two: saved, exit code 75, nothing lost."""

import random
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import tiny_settings
from faults.runs import (
    RUN,
    complete_steps,
    differences,
    finish,
    full_settings,
    last_logged,
    last_saved,
    metrics,
    output_of,
    resumed_from,
    run_folder,
    running,
    wait_for,
    write_config,
)
from forked import ended
from multihost.processes import start_run

pytestmark = pytest.mark.end_to_end

STEPS = 300
STEPS_OF_TWO = 60
STOPPED = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# When a signal is sent, after a random delay. During start-up it ends the run at once.
MOMENTS = ("start-up", "save", "step")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, full_settings(STEPS))
    finish(folder)
    return folder


def catches_signals(process):
    """Whether it has installed its handlers, which it does first of all."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return all(caught >> (number - 1) & 1 for number in SIGNALS)


def marks(folder):
    return list(run_folder(folder).glob("step-*.partial"))


def is_saving(folder):
    return any(not (mark.with_suffix("") / "manifest.json").exists() for mark in marks(folder))


def wait_until(moment, folder, processes, logged, dice):
    """Wait for the moment and a random time. `logged`: the last step that was logged before the start."""
    for process in processes:
        wait_for(lambda process=process: catches_signals(process), processes)
    if moment == "start-up":
        time.sleep(dice.uniform(0, 3))
        return
    # Steps rather than seconds, in which a fast machine could finish. Not 1: until its first step has run, a process
    # ends at once, and only the second step needs the first one of all processes.
    steps = dice.randint(2, 6)
    wait_for(lambda: last_logged(folder) >= logged + steps, processes)
    if moment == "save":
        wait_for(lambda: is_saving(folder), processes)
        time.sleep(dice.uniform(0, 0.1))


def check_stopped(folder, output, from_step):
    """Check a run that resumed from `from_step` and was ended by a signal."""
    assert resumed_from(output) in (from_step, None)
    assert last_saved(folder) == last_logged(folder), output
    assert marks(folder) == []


@pytest.mark.long
def test_stopped_at_random_moments_a_run_saves_its_last_step_and_ends_with_the_same_bytes(undisturbed, tmp_path):
    dice = random.Random(0)
    write_config(tmp_path, full_settings(STEPS))
    for attempt in range(5):
        moment, number, before = MOMENTS[attempt % 3], dice.choice(SIGNALS), last_saved(tmp_path)
        with running(tmp_path) as process:
            wait_until(moment, tmp_path, [process], before, dice)
            process.send_signal(number)
            output = output_of(process, STOPPED)
        check_stopped(tmp_path, output, before)
    before = last_saved(tmp_path)
    assert 0 < before < STEPS
    assert resumed_from(finish(tmp_path)) == before
    assert differences(tmp_path, undisturbed, STEPS) == []


@pytest.mark.long
def test_a_second_signal_exits_immediately_and_the_next_start_resumes_from_a_complete_checkpoint(undisturbed, tmp_path):
    write_config(tmp_path, full_settings(STEPS))
    dice = random.Random(0)
    with running(tmp_path) as process:
        wait_until("save", tmp_path, [process], 0, dice)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "send it again to exit immediately" in process.output.read_text(), [process])
        time.sleep(dice.uniform(0, 0.02))
        process.send_signal(signal.SIGINT)
        output_of(process, STOPPED)
    before = last_saved(tmp_path)
    assert resumed_from(finish(tmp_path)) == before
    assert differences(tmp_path, undisturbed, STEPS) == []


@pytest.fixture(scope="module")
def settings_of_two(undisturbed):
    settings = tiny_settings()
    settings["data"]["cache_dir"] = str(undisturbed / "cache")
    settings["model"] |= {"resid_pdrop": 0.1}
    settings["trainer"] |= {"num_train_steps": STEPS_OF_TWO, "steps_per_eval": 50}
    return settings


@pytest.fixture(scope="module")
def undisturbed_two(settings_of_two, tmp_path_factory):
    """The metrics of a run of two processes that saves only at its end."""
    folder = tmp_path_factory.mktemp("two")
    settings_of_two["trainer"]["checkpointer"] = {"save_interval": None, "keep": []}
    write_config(folder, settings_of_two)
    finish_two(folder)
    assert complete_steps(folder) == [STEPS_OF_TWO]
    return metrics(folder)


def running_two(folder):
    return ended(*start_run(folder, RUN, 2))


def finish_two(folder):
    with running_two(folder) as processes:
        for process in processes:
            output_of(process, 0)


def saved_steps(folder, log):
    """The steps that a process has saved, in order."""
    return [int(step) for step in re.findall(r"saved \S*/step-(\d+)", (folder / "logs" / log).read_text())]


@pytest.mark.long
def test_two_processes_stop_and_save_together_after_a_signal_to_either_and_resume_with_the_same_losses(
    settings_of_two, undisturbed_two, tmp_path
):
    dice = random.Random(0)
    settings_of_two["trainer"]["checkpointer"] = {"save_interval": "1s", "keep": []}
    write_config(tmp_path, settings_of_two)
    for victim, number in ((0, signal.SIGTERM), (1, signal.SIGUSR1)):
        before = last_saved(tmp_path)
        with running_two(tmp_path) as processes:
            wait_until("step", tmp_path, processes, before, dice)
            processes[victim].send_signal(number)
            output, _ = [output_of(process, STOPPED) for process in processes]
        check_stopped(tmp_path, output, before)
        assert last_saved(tmp_path) > before
    stopped_at = last_saved(tmp_path)
    finish_two(tmp_path)
    assert metrics(tmp_path) == undisturbed_two
    saves = saved_steps(tmp_path, f"{RUN}.log")
    assert saves == saved_steps(tmp_path, f"{RUN}.process-1.log")
    assert [
        step for step in saves if stopped_at < step < STEPS_OF_TWO
    ]  # saves of `save_interval`, by the clock of the first process
