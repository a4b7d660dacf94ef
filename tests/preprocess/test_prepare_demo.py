"""The demo corpus, its preparation when a config uses it, and what tools/demo_chat.py and demo_pairs.py make of it."""

import gzip
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from preprocess.conftest import mtimes

from lmtrain.data.config import DataConfig
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess import prepare_demo
from lmtrain.preprocess.input_files import expand_urls
from lmtrain.preprocess.prepare_demo import file_names, write_demo_corpus
from lmtrain.runtime.errors import UserError

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small folder in place of the standard library: 200 modules, and some files that are not part of it."""
    folder = tmp_path / "library"
    for path in [f"m{i}.py" for i in range(150)] + [f"package/m{i}.py" for i in range(50)]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"# {path} é\n", encoding="utf-8")
    for path in ("site-packages/x.py", "__pycache__/x.py", "dist-packages/x.py", "x.txt", "package/x.so"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("not the library")
    (folder / "latin1.py").write_bytes(b"# \xe9\n")
    (folder / "empty.py").write_bytes(b"")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(prepare_demo, "MINIMUM_BYTES", 1000)
    return folder


def documents(folder):
    return {name: [json.loads(line) for line in gzip.open(folder / name)] for name in file_names()}


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_of_the_library_is_one_document_ordered_by_path(library, tmp_path):
    counted, size = write_demo_corpus(str(tmp_path / "demo"))
    found = documents(tmp_path / "demo")
    for part in found.values():
        assert [document["path"] for document in part] == sorted(document["path"] for document in part)
    everything = [document for part in found.values() for document in part]
    expected = {f"m{i}.py" for i in range(150)} | {f"package/m{i}.py" for i in range(50)}
    assert len(everything) == counted == 200
    assert {document["path"] for document in everything} == expected
    assert all(document["text"] == f"# {document['path']} é\n" for document in everything)
    assert size == sum(len(document["text"].encode()) for document in everything)
    assert found["validation.jsonl.gz"]
    (library / "added.py").write_text("# added\n")  # which moves no other file
    write_demo_corpus(str(tmp_path / "after"))
    after = documents(tmp_path / "after")
    assert {name: [d for d in part if d["path"] != "added.py"] for name, part in after.items()} == found


@pytest.mark.parametrize("exists", [True, False])
def test_a_too_small_or_missing_library_is_an_error_and_writes_nothing(library, tmp_path, monkeypatch, exists):
    folder = library if exists else tmp_path / "nothing"
    monkeypatch.setattr(prepare_demo, "MINIMUM_BYTES", 10**9)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    with pytest.raises(UserError, match=rf"{folder} .*data\.train_urls"):
        prepare_demo.prepare_demo(DataConfig(demo=str(tmp_path / "demo")))
    assert not (tmp_path / "demo").exists()


def test_the_library_of_the_running_python_is_large_enough(tmp_path):
    documents_written, size = write_demo_corpus(str(tmp_path))
    assert documents_written > 500
    assert size >= prepare_demo.MINIMUM_BYTES


@pytest.mark.parametrize("name", ["demo/", "folder [1]/demo", "{demo}"])
def test_corpus_and_tokenizer_are_created_where_the_config_reads_them(library, tmp_path, name):
    config = DataConfig(demo=str(tmp_path) + "/" + name)
    prepare_demo.prepare_demo(config)
    assert len(expand_urls(config.urls("train"))) == 8
    assert len(expand_urls(config.urls("validation"))) == 1
    tokenizer = load_tokenizer(config.tokenizer)
    assert tokenizer.eos_id is not None
    assert 256 < tokenizer.vocab_size <= prepare_demo.VOCAB_SIZE


def test_only_missing_files_are_created_with_the_same_bytes(library, tmp_path):
    folder, config = tmp_path / "demo", DataConfig(demo=str(tmp_path / "demo"))
    prepare_demo.prepare_demo(config)
    before, times = files_of(folder), mtimes(folder)
    assert len(before) == 11
    prepare_demo.prepare_demo(config)
    assert mtimes(folder) == times
    for lost in ("validation.jsonl.gz", "train.3-of-8.jsonl.gz", "tokenizer/tokenizer.json"):
        (folder / lost).unlink()
        prepare_demo.prepare_demo(config)
        assert files_of(folder) == before


def test_no_tokenizer_is_trained_for_a_config_with_its_own_and_nothing_is_made_without_the_demo(library, tmp_path):
    before = files_of(tmp_path)
    prepare_demo.prepare_demo(DataConfig(train_urls=["a.jsonl"]))
    assert files_of(tmp_path) == before
    prepare_demo.prepare_demo(DataConfig(demo=str(tmp_path / "demo"), tokenizer="byte"))
    assert not (tmp_path / "demo" / "tokenizer").exists()
    assert (tmp_path / "demo" / "validation.jsonl.gz").exists()


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


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def made_twice(tool, folder, text):
    """Run a tool twice on a demo of this text: it writes the same bytes."""
    (folder / "demo").mkdir()
    for name in ("train.1-of-8.jsonl.gz", "validation.jsonl.gz"):
        with gzip.open(folder / "demo" / name, "wt") as file:
            file.write(json.dumps({"text": text}) + "\n")
    found = []
    for _ in range(2):
        subprocess.run([sys.executable, TOOLS / tool, "demo"], cwd=folder, check=True)
        found.append(files_of(folder))
    assert found[0] == found[1]


def test_every_answer_describes_its_line_and_the_task_has_as_many_questions_for_each(tmp_path):
    made_twice("demo_chat.py", tmp_path, SOURCE)
    made = tmp_path / "demo/chat"
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
    assert len(set(answers.values())) == 8
    task = yaml.safe_load((made / "tasks/line_kinds.yaml").read_text())
    assert len(task["doc_to_choice"]) == 8
    questions = rows(made / "tasks/line_kinds.jsonl")
    assert [sum(row["answer"] == number for row in questions) for number in range(8)] == [50] * 8


def test_the_chosen_lines_of_pairs_follow_the_prompt(tmp_path):
    made_twice("demo_pairs.py", tmp_path, "\n".join(f"line {number}\n" for number in range(30_000)))
    pairs = rows(tmp_path / "demo" / "pairs.train.jsonl")
    assert len(pairs) == 4000
    assert len(rows(tmp_path / "demo" / "pairs.validation.jsonl")) == 200
    for row in pairs:
        last, first = (int(row[name].splitlines()[at].split()[1]) for name, at in (("prompt", -1), ("chosen", 0)))
        assert first == last + 1
    assert sum(row["rejected"] != row["chosen"] for row in pairs) > 3900


def test_without_the_demo_a_tool_says_what_makes_it(tmp_path):
    done = subprocess.run([sys.executable, TOOLS / "demo_chat.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "lmtrain preprocess configs/llama_nano.yaml" in done.stderr
