"""Benchmarks in training and by `lmtrain eval --tasks`: the same results for the same model."""

import json

import pytest
import yaml
from conftest import log_lines, run_in_process, tiny_settings
from evaluation.local_tasks import write_tasks

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with tiny.yaml, trained for 8 steps with a benchmark after every fourth; a second one saved samples."""
    folder = tmp_path_factory.mktemp("trained")
    write_tasks(folder / "tasks", 32)
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 8, "id": "one"}
    settings |= {
        "eval_harness": {"task_spec": ["local_choice", "local_text"], "include_path": "tasks", "log_samples": True},
        "eval_harness_steps": 4,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    run_in_process(["train", "tiny.yaml"], folder, code=0)
    return folder


def evaluate(folder, *arguments, code=0):
    done = run_in_process(["eval", *arguments], folder, code)
    return json.loads(done.stdout) if code == 0 else done.stderr


def test_metrics_are_logged_at_their_interval_and_eval_gives_them_again(trained):
    lines = log_lines(trained)
    logged = {line["step"]: line for line in lines if "eval/lm_eval/local_choice/acc" in line}
    assert sorted(logged) == [4, 8]
    samples = trained / "logs" / "one" / "lm_eval" / "step-8" / "samples_local_choice.jsonl"
    assert len(samples.read_text().splitlines()) == 10
    again = evaluate(trained, "tiny.yaml")
    of_tasks = {name: value for name, value in logged[8].items() if name.startswith("eval/lm_eval/")}
    assert {name: again[name] for name in of_tasks} == of_tasks
    assert again["eval/loss"] == logged[8]["eval/loss"]


def test_tasks_on_the_command_line_replace_those_of_the_config_and_have_standard_errors(trained):
    found = evaluate(trained, "--run", "one", "--tasks", "local_choice,local_perplexity", "--max_examples", "4")
    assert found["step"] == 8
    assert {"eval/lm_eval/local_choice/acc_stderr", "eval/lm_eval/local_perplexity/word_perplexity"} <= found.keys()
    assert not any("local_text" in name or name == "eval/loss" for name in found)


def test_a_hugging_face_model_needs_no_config(trained):
    run_in_process(["export-hf", "tiny.yaml", "--output", "model"], trained, code=0)
    flags = ["--tasks", "local_choice", "--include_path", "tasks"]
    exported = evaluate(trained, "--hf", "model", *flags, "--log_samples", "--output_path", "samples")
    assert (trained / "samples" / "lm_eval" / "step-0" / "samples_local_choice.jsonl").exists()
    mine = evaluate(trained, "tiny.yaml", *flags)
    name = "eval/lm_eval/local_choice/acc"
    assert exported[name] == mine[name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny.yaml", "--num_fewshot", "2"], ["--num_fewshot", "--tasks"]),
        (["tiny.yaml", "--tasks", ","], ["--tasks"]),
        (["--hf", "nothing_here", "--tasks", "local_choice", "--include_path", "tasks"], ["nothing_here"]),
        pytest.param(  # before the checkpoint is read
            ["tiny.yaml", "--trainer.id", "none", "--tasks", "local_choise,other"],
            ["local_choise", "other"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_bad_flags_are_errors(trained, arguments, words):
    output = evaluate(trained, *arguments, code=2)
    for word in words:
        assert word in output
    assert "checkpoint" not in output
