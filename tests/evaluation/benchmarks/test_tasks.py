"""Tasks of lm-eval: their settings, their data, and their code, which runs only if that is allowed."""

import os
import subprocess
import sys

import pytest
from conftest import TOKENIZER
from evaluation.local_tasks import harness, write_tasks

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.benchmarks.tasks import load_tasks
from lmtrain.runtime.errors import UserError


def test_the_number_of_examples_in_a_prompt_is_that_of_the_task_then_of_the_run(gpt2, tmp_path):
    context, _ = gpt2
    config = harness(tmp_path, "local_choice", {"task": "local_text", "num_fewshot": 2}, num_fewshot=3)
    text = (tmp_path / "local_text.yaml").read_text()
    (tmp_path / "local_text.yaml").write_text(text.replace("num_fewshot: 0", "num_fewshot: 1\nfewshot_split: test"))
    one = Benchmarks(config, None)
    assert one.prepare(context)
    found = {name: task.get_config("num_fewshot") for name, task in one._tasks["tasks"].items()}
    assert found == {"local_choice": 0, "local_text": 2}


def test_code_of_a_task_runs_if_it_is_confirmed(gpt2, tmp_path):
    context, params = gpt2
    config = harness(tmp_path, "local_choice", confirm_run_unsafe_code=True)
    (tmp_path / "code.py").write_text("def run(docs):\n    return docs.select(range(2))\n")
    task = tmp_path / "local_choice.yaml"
    task.write_text(f"process_docs: !function code.run\n{task.read_text()}")
    one = Benchmarks(config, None)
    assert one.prepare(context)
    assert len(one._tasks["tasks"]["local_choice"].eval_docs) == 2
    assert one.evaluate(params, 0)


@pytest.mark.long  # the library reads all its tasks; so it does for the misspelt one above
def test_a_task_of_the_hub_without_a_network_fails_with_advice(gpt2):
    context, _ = gpt2
    config = EvalHarnessConfig(task_spec=["hellaswag"])
    with pytest.raises(UserError, match=r"(?s)hellaswag.*include_path"):
        Benchmarks(config, None).prepare(context)


OFFLINE = """
import sys
from types import SimpleNamespace
from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.hf.tokenizer import load_tokenizer
context = SimpleNamespace(tokenizer=load_tokenizer(sys.argv[1]), seq_len=32)
try:
    Benchmarks(EvalHarnessConfig(task_spec=["local_choice"], include_path="."), None).prepare(context)
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_without_a_network_the_first_line_is_the_message(tmp_path):
    write_tasks(tmp_path, 32)
    task = tmp_path / "local_choice.yaml"
    lines = [line for line in task.read_text().splitlines() if not line.startswith("dataset_path")]
    task.write_text("\n".join([*lines, "dataset_path: acme/nothing"]))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no server: refused at once
    command = [sys.executable, "-c", OFFLINE, str(TOKENIZER)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("eval_harness.task_spec: ")
    assert "local_choice" in done.stdout.splitlines()[0]
    assert "retry" not in done.stderr.lower()
    assert "127.0.0.1" not in done.stderr


@pytest.mark.parametrize(
    ("line", "place"),
    [("process_docs: !function code.run", "local_text.yaml:1"), ("include: other.yaml", "other.yaml:2")],
)
def test_tasks_that_run_code_are_refused_with_its_place(tmp_path, line, place):
    config = harness(tmp_path, "local_text")
    task = tmp_path / "local_text.yaml"
    task.write_text(f"{line}\n{task.read_text()}")
    (tmp_path / "code.py").write_text("raise SystemExit('code was run')")
    (tmp_path / "other.yaml").write_text("task: other\nprocess_docs: !function code.run\n")
    with pytest.raises(UserError, match=f"{place}: .*--confirm_run_unsafe_code"):
        load_tasks(config)
