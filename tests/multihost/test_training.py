"""Multi-process training: the same losses and parameters for any number of processes; all end when one dies."""

import json
import signal

import numpy as np
import pytest
from conftest import log_lines, run_in_process, tiny_settings
from evaluation.local_tasks import write_tasks
from faults.runs import DEADLINE_SECONDS, output_of, wait_for
from forked import ended
from multihost.processes import start_run
from safetensors.numpy import load_file

pytestmark = pytest.mark.end_to_end


def split_settings(steps, every):
    """A config of 4 devices in a mesh of 2 x 2."""
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": steps, "model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]}
    settings["trainer"] |= {"steps_per_eval": every, "per_device_parallelism": 1}
    settings["optimizer"]["lr_schedule"] = "constant"  # so that a run without end has the same compiled step
    return settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config and its caches."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "tiny.json").write_text(json.dumps(split_settings(6, every=3) | {"hf_save_path": "exports"}))
    run_in_process(["preprocess", "tiny.json"], folder, code=0)
    return folder


def complete(folder, run, count):
    """Run to the end. -> the entries of the metrics log"""
    for process in start_run(folder, run, count):
        output_of(process, 0)
    return log_lines(folder, run)


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


def test_the_second_process_logs_only_to_its_own_file(folder, two):
    first, second = ((folder / f"two.{number}.txt").read_text() for number in range(2))
    assert "done: checkpoints in checkpoints/two" in first
    assert "loss" in first
    assert "loss" not in second
    assert (folder / "logs" / "two.process-1.log").exists()


@pytest.mark.long
def test_four_processes_are_bitwise_identical_to_two(folder, two):
    logged, params = finish(folder, "four", 4)
    assert logged == two[0]
    assert params.keys() == two[1].keys()
    for name in params:
        np.testing.assert_array_equal(params[name], two[1][name], err_msg=name)


# Exit codes of a process that has lost another one: its own, or that of JAX, which aborts it.
LOST = (1, -signal.SIGABRT)


# A dead process closes its connections; one that hangs is detected by its missing heartbeat.
@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGKILL, 1, marks=[pytest.mark.long, pytest.mark.release]),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.long),
    ],
)
def test_when_one_process_dies_or_hangs_the_other_ends_too(folder, fault, victim):
    run = f"dies-{int(fault)}-{victim}"
    flags = ["--trainer.num_train_steps", 100000, "--trainer.distributed.heartbeat_timeout", "5s"]
    with ended(*start_run(folder, run, 2, *flags)) as processes:
        metrics = folder / "logs" / f"{run}.metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("train/loss") > 3, processes)
        processes[victim].send_signal(fault)
        other = processes[1 - victim]
        assert other.wait(timeout=DEADLINE_SECONDS) in LOST, other.output.read_text()


def test_a_user_error_in_one_process_ends_the_other_too(folder):
    """A normal exit of Python would wait for the other process, which waits for this one. Only the first uploads."""
    with ended(*start_run(folder, "mistake", 2, "--hf_upload", "someone/model", HF_TOKEN="")) as processes:
        output_of(processes[0], 2)
        assert processes[1].wait(timeout=DEADLINE_SECONDS) in LOST, processes[1].output.read_text()


@pytest.fixture(scope="module")
def base(tiny_run, tmp_path_factory):
    """The folder of a model of transformers."""
    folder = tmp_path_factory.mktemp("base")
    run_in_process(["export-hf", "tiny.json", "--trainer.id", "one", "--output", folder], tiny_run, code=0)
    return folder


@pytest.mark.long
def test_two_processes_have_the_adapters_and_the_results_of_benchmarks_of_one(base, tmp_path):
    tasks = write_tasks(tmp_path / "tasks", 32)
    settings = split_settings(4, every=4) | {"initialize_from_hf": str(base), "hf_save_path": "exports"}
    settings["lora"] = {"r": 4, "alpha": 16, "modules_to_save": ["lm_head"]}
    settings["eval_harness"] = {"task_spec": tasks, "include_path": "tasks", "log_samples": True}
    (tmp_path / "tiny.json").write_text(json.dumps(settings))
    found = []
    for count in (1, 2):
        run = f"of-{count}"
        lines = complete(tmp_path, run, count)
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        (results,) = [line for line in lines if "eval/lm_eval/local_choice/acc" in line]
        results = {name: value for name, value in results.items() if name.startswith("eval/lm_eval/")}
        samples = {path.name for path in (tmp_path / "logs" / run / "lm_eval" / "step-4").iterdir()}
        assert samples == {f"samples_{task}.jsonl" for task in tasks}
        adapters = load_file(tmp_path / "exports" / run / "step-4" / "adapter_model.safetensors")
        info = json.loads((tmp_path / "checkpoints" / run / "step-4" / "run.json").read_text())
        found.append((losses, results, adapters, info["base"]["fingerprint"]))
    (losses, results, adapters, mark), (their_losses, their_results, their_adapters, their_mark) = found
    assert mark == their_mark
    np.testing.assert_allclose(their_losses, losses, rtol=1e-5)
    assert their_results == pytest.approx(results, rel=1e-4)
    assert their_adapters.keys() == adapters.keys()
    for name, values in adapters.items():
        np.testing.assert_allclose(their_adapters[name], values, rtol=0, atol=2e-3, err_msg=name)


@pytest.mark.long
def test_four_processes_that_split_sequences_compare_answers_as_one(base, tmp_path):
    """Each reads half of the columns of its sequences, and of the reference."""
    rows = [
        {"prompt": "A star", "chosen": f" has {n} robots.", "rejected": f" is {n} rivers" * (1 + n % 4)}
        for n in range(40)
    ]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for count in (1, 4):
        settings = tiny_settings() | {"initialize_from_hf": str(base), "objective": {"type": "dpo", "loss": "ipo"}}
        settings["data"] |= {
            "train_urls": ["train.jsonl"],
            "validation_urls": ["validation.jsonl"],
            "cache_dir": f"cache-{count}",
            "format": {"type": "preference"},
        }
        settings["trainer"] |= {"num_train_steps": 4, "steps_per_eval": 4, "context_axis_size": 2}
        (tmp_path / "tiny.json").write_text(json.dumps(settings))
        lines = complete(tmp_path, f"of-{count}", count)
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        (held_out,) = [line["eval/preferences/loss"] for line in lines if "eval/preferences/loss" in line]
        (stored,) = (tmp_path / f"cache-{count}" / "train").glob("reference-*.npy")
        found.append((losses, held_out, np.load(stored)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    assert (found[0][2] < 0).all()
