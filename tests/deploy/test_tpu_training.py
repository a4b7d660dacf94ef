"""`lmtrain train` under babysit on preempted VMs: the same run, every step once, the same losses."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import tiny_settings
from deploy.test_tpu import MADE_OF, PLACE, SECRET, Desk, wait_for

pytestmark = pytest.mark.end_to_end

STEPS = 150
# Steps at which the VM is preempted; checkpoints are saved every 25 steps, and at SIGTERM.
FIRST, SECOND = 30, 90


def write_config(bucket: Path, cache: Path) -> Path:
    """A run that stores everything in a folder which outlives the VMs, like a bucket."""
    bucket.mkdir()
    settings = tiny_settings()
    settings["data"]["cache_dir"] = str(cache)
    settings["model"]["resid_pdrop"] = 0.1
    settings["trainer"] |= {
        "num_train_steps": STEPS,
        "steps_per_eval": 50,
        "log_dir": str(bucket / "logs"),
        "checkpointer": {
            "base_path": str(bucket / "checkpoints"),
            "save_interval": None,
            "keep": [{"every": 25}],
        },
    }
    path = bucket / "my.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def losses(bucket: Path, run_id: str) -> list[tuple[int, float]]:
    """The steps of the metrics log, in order; the last line may be incomplete."""
    path = bucket / "logs" / f"{run_id}.metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def complete(bucket: Path, run_id: str) -> list[int]:
    manifests = (bucket / "checkpoints" / run_id).glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in manifests)


@pytest.fixture
def undisturbed(tmp_path):
    """The losses of an uninterrupted run, which also builds the cache."""
    config = write_config(tmp_path / "alone", tmp_path / "cache")
    command = [sys.executable, "-m", "lmtrain", "train", config, "--trainer.id", "alone"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return losses(tmp_path / "alone", "alone")


@pytest.mark.long
def test_preempted_twice_it_finishes_the_same_run_and_loses_no_work(undisturbed, tmp_path):
    desk = Desk(tmp_path / "desk")
    # the result of tools/install.sh: lmtrain in ~/lmtrain/.venv/bin
    program = "#!/bin/sh\nexec " + shlex.join([sys.executable, "-m", "lmtrain"]) + ' "$@"\n'
    desk.setup.write_text(
        "mkdir -p ~/lmtrain/.venv/bin && cd ~/lmtrain/.venv/bin\n"
        f"printf %s {shlex.quote(program)} > lmtrain && chmod +x lmtrain\n"
    )
    bucket = tmp_path / "bucket"
    config = write_config(bucket, tmp_path / "cache")
    same = [f"{name}={os.environ[name]}" for name in ("JAX_PLATFORMS", "XLA_FLAGS")]
    words = [*same, "lmtrain", "train", str(config), "--trainer.tracker", "{type: json}"]
    process = desk.start("babysit", *PLACE, *MADE_OF, *desk.own_setup, "--retries", "1", "--", *words, HF_TOKEN=SECRET)
    try:
        wait_for(lambda: (bucket / "logs").exists() and list((bucket / "logs").glob("*.metrics.jsonl")))
        (run_id,) = (path.name.removesuffix(".metrics.jsonl") for path in (bucket / "logs").glob("*.metrics.jsonl"))
        wait_for(lambda: len(losses(bucket, run_id)) >= FIRST)
        desk.preempt(signal.SIGTERM)
        stopped_at = losses(bucket, run_id)[-1][0]
        assert FIRST <= stopped_at < STEPS
        assert complete(bucket, run_id)[-1] == stopped_at  # SIGTERM loses no step
        wait_for(lambda: losses(bucket, run_id)[-1][0] >= max(SECOND, stopped_at + 1))
        desk.preempt(signal.SIGKILL)
        assert losses(bucket, run_id)[-1][0] < STEPS
        out, printed = process.communicate(timeout=300)
    finally:
        desk.end()
    assert process.returncode == 0, printed
    assert desk.verbs().count("create") == 3
    assert printed.count(f"RUN_ID={run_id}") == 1
    assert [path.name for path in (bucket / "checkpoints").iterdir()] == [run_id]
    assert f"resuming after step {stopped_at}" in printed
    assert losses(bucket, run_id) == undisturbed
    assert [step for step, _ in undisturbed] == list(range(1, STEPS + 1))
    assert complete(bucket, run_id)[-1] == STEPS
    assert "hf_do-not" not in out + printed + json.dumps(desk.calls())
