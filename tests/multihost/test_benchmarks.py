"""Benchmarks in a run of two processes: every process answers the same requests, and the results are those of one."""

import json

import pytest
from conftest import run_in_process, tiny_settings
from evaluation.local_tasks import write_tasks
from multihost.test_training import complete

pytestmark = [pytest.mark.end_to_end, pytest.mark.long]


def test_two_processes_have_the_results_of_one(tmp_path):
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 4, "model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]}
    settings["trainer"] |= {"steps_per_eval": 4, "per_device_parallelism": 1}
    tasks = write_tasks(tmp_path / "tasks", 32)
    settings |= {"eval_harness": {"task_spec": tasks, "include_path": "tasks", "log_samples": True}}
    (tmp_path / "tiny.json").write_text(json.dumps(settings))
    assert run_in_process(["preprocess", "tiny.json"], tmp_path).returncode == 0
    found = []
    for count in (1, 2):
        run = f"of-{count}"
        lines = complete(tmp_path, run, count)
        (metrics,) = [line for line in lines if "eval/lm_eval/local_choice/acc" in line]
        found.append({name: value for name, value in metrics.items() if name.startswith("eval/lm_eval/")})
        folder = tmp_path / "logs" / run / "lm_eval" / "step-4"
        assert sorted(path.name for path in folder.iterdir()) == sorted(f"samples_{task}.jsonl" for task in tasks)
    assert found[1].keys() == found[0].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, rel=1e-4), name
