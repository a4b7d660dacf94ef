"""`lmtrain scaling predict --device`: the cost by the plan's bound."""

import json

import pytest
import yaml
from compiled.plans import KEPT, run
from conftest import run_in_process
from scaling.made_ladder import BASE, write_ladder, write_results

SIZES = {"hidden_dim": 512, "intermediate_dim": 1408, "num_heads": 8, "num_layers": 4, "seq_len": 1024}


def test_the_cost_is_that_of_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", KEPT)  # the same plan is compiled once
    write_results(tmp_path, write_ladder(tmp_path))
    big = BASE | {"model": BASE["model"] | SIZES, "trainer": {"train_batch_size": 64, "num_train_steps": 1000}}
    (tmp_path / "big.yaml").write_text(yaml.safe_dump(big))
    devices = ("--device", "h100", "--devices", "8")
    planned = run("big.yaml", *devices, "--step", "train", "--json", folder=str(tmp_path))
    bound = json.loads(planned.stdout)["mfu_bound"]
    assert 0 < bound < 1
    command = ["scaling", "predict", "ladder.yaml", "--config", "big.yaml", *devices, "--efficiency", "0.5", "--json"]
    answer = json.loads(run_in_process(command, tmp_path, code=0).stdout)
    assert answer["device_hours"] == pytest.approx(answer["flops"] / (0.5 * bound * 989.4e12) / 3600, rel=1e-3)
    best = [*command[:-1], "--hours", "0.01", "--write", "best.yaml"]
    text = run_in_process(best, tmp_path, code=0).stdout
    assert f"50 % of the plan's bound of {100 * bound:.1f} % MFU" in text
    run_in_process(["config", "check", "best.yaml"], tmp_path, code=0)
