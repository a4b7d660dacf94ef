"""Ladders with real runs: killed and stopped at any moment, with branches that are straight runs to the last bit."""

import json
import os
import signal

import pytest
import yaml
from conftest import logged, run_in_process, tiny_settings
from faults.runs import array_bytes, last_logged, log_file, output_of, wait_for
from forked import Forked, ended
from pages import ROOT

from lmtrain.commands.scaling import read_ladder
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL
from lmtrain.scaling.points import arguments_of, points

pytestmark = pytest.mark.end_to_end

SIZES = {"hidden_dim": 16, "intermediate_dim": 48, "num_heads": 2, "num_layers": 1}


def write_ladder(folder, **changes):
    settings = tiny_settings()
    settings["model"] = {"type": "llama", **SIZES, "seq_len": 32, "gradient_checkpointing": False}
    settings["optimizer"] = {"learning_rate": 5e-3, "warmup": 20}
    settings["trainer"] |= {"steps_per_eval": 100, "max_eval_batches": 4, "checkpointer": {"save_interval": "1s"}}
    del settings["trainer"]["num_train_steps"]
    ladder = {"config": "tiny", "sizes": [SIZES], "tokens_per_parameter": [3, 5], **changes}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    (folder / "ladder.yaml").write_text(yaml.safe_dump(ladder))


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_ladder_that_is_killed_and_stopped_has_the_runs_of_an_undisturbed_one(tmp_path, monkeypatch, stopped):
    monkeypatch.chdir(tmp_path)
    write_ladder(tmp_path, tokens_per_parameter=[3, 5] if stopped else [1, 2])
    ladder = read_ladder("ladder.yaml", None)
    longest, branch = points(ladder, [5e-3])
    output = disturb(tmp_path, longest, signal.SIGKILL)
    assert f"ladder: {longest.id}, then 1 run" in output
    if stopped:
        output = disturb(tmp_path, branch, signal.SIGTERM)
        assert output.splitlines()[-1] == "ladder: stopped; run the same command again to resume"
        status = run_in_process(["scaling", "status", "ladder.yaml"], tmp_path, code=0)
        assert status.stdout.splitlines()[-1].startswith("left: 1 run, ")
    with ended(start(tmp_path)) as (process,):
        assert output_of(process, 0).splitlines()[-1] == "complete"
    for point in (longest, branch) if stopped else (branch,):  # which contains the beginning of the longest
        _, config, *flags = arguments_of(ladder, point)
        own = [flag for flag in flags if not flag.startswith(("--trainer.id", "--trainer.initialize_from"))]
        run_in_process(["train", config, *own, "--trainer.id=straight"], tmp_path, code=0)
        last = point.steps
        assert array_bytes(tmp_path, last, point.id) == array_bytes(tmp_path, last, "straight")
        losses = [logged(tmp_path, "eval/loss", run)[last] for run in (point.id, "straight")]
        assert losses[0] == losses[1]
        for part in ("checkpoints", "logs"):
            (tmp_path / part / "straight").rename(tmp_path / part / f"straight {last}")
        log_file(tmp_path, "straight").unlink()


def start(folder, *words, **environment):
    command = words or ("scaling", "run", "ladder.yaml")
    return Forked(list(command), folder, folder / "output.txt", **environment)


def disturb(folder, point, number):
    """Start the ladder, and send it this signal in the middle of a run. -> its output"""
    with ended(start(folder)) as (process,):
        wait_for(lambda: last_logged(folder, point.id) >= point.start + 5, [process])
        os.kill(process.pid, number)
        return output_of(process, STOPPED_BY_SIGNAL if number == signal.SIGTERM else -number)


def test_errors_of_a_run_end_the_ladder(tmp_path):
    """And the other runs have not started."""
    write_ladder(tmp_path, overrides={"data.train_urls": ["nothing-*.jsonl"]})
    with ended(start(tmp_path)) as (process,):
        assert "nothing-*.jsonl" in output_of(process, 2)
    assert not list((tmp_path / "checkpoints").glob("*-3x-*"))


@pytest.mark.long
@pytest.mark.release  # tests/commands/test_scaling.py predicts from results, and the suite runs and kills a ladder
def test_three_sizes_predict_a_model_of_2_6_times_the_largest(tmp_path):
    """The ladder of the guide, without its two largest sizes and with fewer tokens."""
    shipped = yaml.safe_load((ROOT / "configs/ladders/nano.yaml").read_text())
    shorter = {"config": "llama_nano", "sizes": shipped["sizes"][:3], "tokens_per_parameter": [5, 10, 20]}
    shorter |= {"learning_rates": [1.6e-2], "seeds": [0]}
    (tmp_path / "ladder.yaml").write_text(yaml.safe_dump(shipped | shorter))
    fast = {"XLA_FLAGS": ""}  # the suite's are for short runs
    process = start(tmp_path, **fast)
    assert process.wait(timeout=1800) == 0, process.output.read_text()
    large = ["model.hidden_dim=48", "model.intermediate_dim=128", "model.num_heads=6", "model.num_layers=4"]
    settings = [f"--{setting}" for setting in (*large, "trainer.num_train_steps=1200")]
    shown = run_in_process(["config", "show", "ladders/nano_large", *settings], tmp_path, code=0).stdout
    (tmp_path / "large.yaml").write_text(shown)
    command = ["scaling", "predict", "ladder.yaml", "--config", "large.yaml", "--json"]
    answer = json.loads(run_in_process(command, tmp_path, code=0).stdout)
    process = start(tmp_path, "train", "large.yaml", "--trainer.id", "large", **fast)
    assert process.wait(timeout=1800) == 0, process.output.read_text()
    loss = logged(tmp_path, "eval/loss", "large")[1200]
    print(answer, loss)
    assert answer["size_factor"] > 2.5
    assert answer["interval"][0] < loss < answer["interval"][1]
    assert answer["loss"] == pytest.approx(loss, rel=0.04)
