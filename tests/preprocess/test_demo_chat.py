"""tools/demo_chat.py: conversations of real lines, and a task for lm-eval."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TOOL = Path(__file__).parents[2] / "tools/demo_chat.py"
SOURCE = """import json
from os import path


class Reader:
    # a comment
    def read(self, size):
        if size < 0:
            raise ValueError(size)
        assert size
        return path.join(json.dumps(size), "x")
"""


def run(folder):
    return subprocess.run([sys.executable, TOOL, "demo"], cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "demo").mkdir()
    for name in ("train.1-of-8.jsonl.gz", "validation.jsonl.gz"):
        with gzip.open(folder / "demo" / name, "wt") as file:
            file.write(json.dumps({"text": SOURCE}) + "\n")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder / "demo/chat"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_answer_describes_its_line(made):
    conversations = [row["messages"] for row in rows(made / "train.jsonl")]
    assert len(conversations) == 4000
    assert {len(messages) for messages in conversations} == {2, 4, 6}
    answers = {}
    for messages in conversations:
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            assert (question["role"], answer["role"]) == ("user", "assistant")
            answers[question["content"].removeprefix("What does this line do?\n")] = answer["content"]
    assert answers["def read(self, size):"] == "It defines a function."
    assert answers["from os import path"] == answers["import json"] == "It imports a module."
    assert answers["raise ValueError(size)"] == "It raises an exception."
    assert len(set(answers.values())) == 8


def test_the_task_has_the_same_number_of_questions_for_each_answer(made):
    task = yaml.safe_load((made / "tasks/line_kinds.yaml").read_text())
    questions = rows(made / "tasks/line_kinds.jsonl")
    assert len(task["doc_to_choice"]) == 8
    assert [sum(row["answer"] == number for row in questions) for number in range(8)] == [50] * 8


def test_the_same_demo_gives_the_same_bytes(made):
    files = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert run(made.parents[1]).returncode == 0
    assert {path: path.read_bytes() for path in files} == files


def test_without_the_demo_it_says_what_makes_it(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert "train.1-of-8.jsonl.gz not found; `lmtrain preprocess configs/llama_nano.yaml` makes the demo" in done.stderr
