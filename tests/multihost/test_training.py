"""Multi-process training: the same losses and parameters for any number of processes; all end when one dies."""

import json
import signal
import socket
import time

import numpy as np
import pytest
from conftest import run_in_process, tiny_settings
from forked import Forked, fake_devices
from safetensors.numpy import load_file

pytestmark = pytest.mark.end_to_end

DEVICES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config of 4 devices in a mesh of 2 x 2, in a folder with its caches."""
    folder = tmp_path_factory.mktemp("training")
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 6, "model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]}
    settings["trainer"] |= {"steps_per_eval": 3, "per_device_parallelism": 1}
    settings["hf_save_path"] = "exports"
    (folder / "tiny.json").write_text(json.dumps(settings))
    assert run_in_process(["preprocess", "tiny.json"], folder).returncode == 0
    return folder


def start(folder, run, count, *flags, **environment):
    """The processes of a run, with output to `<run>.<number>.txt`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    meet = [] if count == 1 else ["--trainer.distributed.coordinator_address", f"127.0.0.1:{port}"]
    here = fake_devices(DEVICES // count)
    running = []
    for number in range(count):
        place = meet and [*meet, "--trainer.distributed.num_processes", count]
        place = place and [*place, "--trainer.distributed.process_id", number]
        arguments = ["train", "tiny.json", "--trainer.id", run, *place, *flags]
        running.append(Forked(arguments, folder, folder / f"{run}.{number}.txt", XLA_FLAGS=here, **environment))
    return running


def complete(folder, run, count):
    """Run to the end. -> the entries of the metrics log"""
    for number, process in enumerate(start(folder, run, count)):
        assert process.wait(timeout=300) == 0, (folder / f"{run}.{number}.txt").read_text()
    return [json.loads(line) for line in (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()]


def finish(folder, run, count):
    lines = complete(folder, run, count)
    names = ("train/loss", "eval/loss", "train/gradient_norm")
    logged = [{name: entry[name] for name in names if name in entry} for entry in lines]
    params = load_file(folder / "exports" / run / "step-6" / "model.safetensors")
    return [entry for entry in logged if entry], params


@pytest.fixture(scope="module")
def two(folder):
    return finish(folder, "two", 2)


def test_two_processes_have_the_losses_and_parameters_of_one(folder, two):
    """Within a tolerance, since the order of sums over devices differs."""
    logged, params = finish(folder, "one", 1)
    assert len(logged) == len(two[0]) == 8
    for one, other in zip(logged, two[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert params.keys() == two[1].keys()
    for name in params:
        np.testing.assert_allclose(params[name], two[1][name], atol=1e-4, err_msg=name)


@pytest.mark.long
def test_four_processes_are_bitwise_identical_to_two(folder, two):
    logged, params = finish(folder, "four", 4)
    assert logged == two[0]
    assert params.keys() == two[1].keys()
    for name in params:
        np.testing.assert_array_equal(params[name], two[1][name], err_msg=name)


@pytest.mark.long  # the short form: a user error in one process
# A dead process closes its connections; one that hangs is detected by its missing heartbeat.
@pytest.mark.parametrize(
    ("fault", "victim", "codes", "seconds"),
    [
        (signal.SIGKILL, 1, [1, 134, -6], 120),
        (signal.SIGSTOP, 0, [1, 134, -6], 120),
    ],
)
def test_when_one_process_dies_or_hangs_the_other_ends_with_an_error(folder, fault, victim, codes, seconds):
    run = f"dies-{int(fault)}"
    flags = ["--trainer.num_train_steps", 100000, "--trainer.distributed.heartbeat_timeout", "5s"]
    processes = start(folder, run, 2, *flags)
    try:
        metrics = folder / "logs" / f"{run}.metrics.jsonl"
        until = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("train/loss") > 3):
            assert time.monotonic() < until, (folder / f"{run}.0.txt").read_text()
            time.sleep(0.1)
        processes[victim].send_signal(fault)
        assert processes[1 - victim].wait(timeout=seconds) in codes
    finally:
        for process in processes:
            process.kill()
            process.wait()
    output = (folder / f"{run}.{1 - victim}.txt").read_text()
    assert "is aborting the run" in output or "another task died" in output


def test_a_user_error_in_one_process_ends_the_other_too(folder):
    """A normal exit of Python would wait for the other process, which waits for this one. Only the first uploads."""
    processes = start(folder, "mistake", 2, "--hf_upload", "someone/model", HF_TOKEN="")
    output = [(folder / f"mistake.{number}.txt") for number in range(2)]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes[0] == 2, output[0].read_text()
    assert codes[1] in (1, 134, -6), output[1].read_text()
