"""`lmtrain train` under babysit on preempted VMs: the same run, every step once, the same losses."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from conftest import logged, run_in_process, tiny_settings
from deploy.desk import Desk
from deploy.workers import running_workers
from faults.runs import complete_steps, last_logged, wait_for, write_config

pytestmark = pytest.mark.end_to_end

STEPS = 150
# Steps at which the VM is preempted; checkpoints are saved every 25 steps, and at SIGTERM.
FIRST, SECOND = 30, 90


def make_bucket(bucket: Path, cache: Path) -> Path:
    """The config of a run that stores everything in a folder which outlives the VMs, like a bucket."""
    settings = tiny_settings()
    settings["data"]["cache_dir"] = str(cache)
    settings["model"]["resid_pdrop"] = 0.1
    settings["trainer"] |= {"num_train_steps": STEPS, "steps_per_eval": 50, "log_dir": str(bucket / "logs")}
    keep = {"save_interval": None, "keep": [{"every": 25}]}
    settings["trainer"]["checkpointer"] = {"base_path": str(bucket / "checkpoints"), **keep}
    write_config(bucket, settings)
    return bucket / "tiny.json"


def preempt(desk: Desk, number: int) -> None:
    """Preempt like Google: SIGTERM to every process, or SIGKILL for no warning. The disk is lost."""
    with desk.state() as state:
        vm = state["vm"]
        vm |= {"gone": True, "states": ["PREEMPTED"]}
        desk.signal(vm, number)
    wait_for(lambda: not desk.processes(vm))


@pytest.fixture
def undisturbed(tmp_path):
    """The losses of an uninterrupted run, which also builds the cache."""
    config = make_bucket(tmp_path / "alone", tmp_path / "cache")
    run_in_process(["train", str(config), "--trainer.id", "alone"], tmp_path, code=0)
    return logged(tmp_path / "alone", "train/loss", "alone")


@pytest.mark.long
def test_preempted_twice_it_finishes_the_same_run_and_loses_no_work(undisturbed, tmp_path):
    folder, bucket = tmp_path / "desk", tmp_path / "bucket"
    folder.mkdir()
    config = make_bucket(bucket, tmp_path / "cache")
    same = [f"{name}={os.environ[name]}" for name in ("JAX_PLATFORMS", "XLA_FLAGS")]
    words = [*same, "lmtrain", "train", str(config), "--trainer.tracker", "{type: json}"]
    with running_workers(folder) as workers:
        desk = Desk(folder, workers)
        # the result of tools/install.sh: lmtrain in ~/lmtrain/.venv/bin
        program = "#!/bin/sh\nexec " + shlex.join([sys.executable, "-m", "lmtrain"]) + ' "$@"\n'
        desk.setup.write_text(
            "mkdir -p ~/lmtrain/.venv/bin && cd ~/lmtrain/.venv/bin\n"
            f"printf %s {shlex.quote(program)} > lmtrain && chmod +x lmtrain\n"
        )
        process = desk.start_babysit("--retries", "1", "--", *words, HF_TOKEN="hf_do-not-tell")
        try:
            (log,) = wait_for(lambda: list(bucket.glob("logs/*.metrics.jsonl")), [process])
            run_id = log.name.removesuffix(".metrics.jsonl")
            wait_for(lambda: last_logged(bucket, run_id) >= FIRST, [process])
            preempt(desk, signal.SIGTERM)
            stopped_at = last_logged(bucket, run_id)
            assert FIRST <= stopped_at < STEPS
            assert complete_steps(bucket, run_id)[-1] == stopped_at  # SIGTERM loses no step
            wait_for(lambda: last_logged(bucket, run_id) >= max(SECOND, stopped_at + 1), [process])
            preempt(desk, signal.SIGKILL)
            assert last_logged(bucket, run_id) < STEPS
            out, printed = process.communicate(timeout=300)
        finally:
            desk.end()
    assert process.returncode == 0, out + printed
    assert desk.verbs().count("create") == 3
    assert printed.count(f"RUN_ID={run_id}") == 1
    assert [path.name for path in (bucket / "checkpoints").iterdir()] == [run_id]
    assert f"resuming after step {stopped_at}" in out
    assert logged(bucket, "train/loss", run_id) == undisturbed
    assert list(undisturbed) == list(range(1, STEPS + 1))
    assert complete_steps(bucket, run_id)[-1] == STEPS
    assert "hf_do-not" not in out + printed + json.dumps(desk.calls())
