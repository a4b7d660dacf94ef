"""Checks of training text: parts of benchmark items and documents that occur twice are found, each and no others."""

import json
import os
import random

import numpy as np
import pytest
import yaml

from lmtrain.commands import preprocess
from lmtrain.data.caches import open_store
from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.runtime.errors import UserError

VOCABULARY = [f"{a}{b}{c}" for a in "bdfgk" for b in ("a", "é", "io") for c in ("lt", "n", "rm", "st")]
TASK = {
    "task": "quiz",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A benchmark of 30 items, and two sources, in which parts of items and duplicates are planted."""
    monkeypatch.chdir(tmp_path)
    dice = random.Random(0)

    def text(words):
        return " ".join(dice.choices(VOCABULARY, k=words))

    items = [{"question": text(20), "choices": [text(3), text(4)], "answer": 0} for _ in range(30)]
    items.append({"question": "short", "choices": ["a", "b"], "answer": 1})
    os.mkdir("tasks")
    write("tasks/quiz.jsonl", items)
    settings = TASK | {"dataset_kwargs": {"data_files": {"test": os.path.abspath("tasks/quiz.jsonl")}}}
    (tmp_path / "tasks/quiz.yaml").write_text(yaml.safe_dump(settings))
    documents = {name: [text(dice.randint(5, 120)) for _ in range(150)] for name in ("web", "books", "validation")}
    planted = {}
    for number in range(10):
        question = items[number]["question"].split()
        part = {0: question, 1: question[4:17], 2: question[:12]}[number % 3]  # all, 13 words, and too few
        spelled = ", ".join(word.upper() if number % 2 else word for word in part)
        place = dice.randrange(150)
        words = documents["web"][place].split()
        cut = dice.randrange(len(words))
        before = " ".join(words[:cut])
        documents["web"][place] = f"{before}. {spelled}! {' '.join(words[cut:])}"
        if number % 3 != 2:
            planted[place] = (number, len(before) + 2, len(part))
    # an answer with the end of its question
    documents["books"][7] = f"x {' '.join(items[20]['question'].split()[10:])} Answer: {items[20]['choices'][1]} y"
    documents["web"][149] = documents["web"][3].upper()  # twice in it
    documents["books"][100] = documents["web"][90] + "  !"  # in both
    documents["books"][120] = documents["validation"][5]
    for name, texts in documents.items():
        write(f"{name}.jsonl", [{"text": one} for one in texts])
    config = {
        "data": {
            "configs": {
                "web": {"train_urls": ["web.jsonl"], "validation_urls": ["validation.jsonl"]},
                "books": {"train_urls": ["books.jsonl"]},
            },
            "split_bytes": 20_000,
            "tokenizer": "byte",
            "num_preprocess_workers": 2,
        },
        "model": {"type": "gpt2", "hidden_dim": 16, "num_heads": 2, "num_layers": 1, "seq_len": 32},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return documents, planted


def write(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def run(*flags):
    assert preprocess.run(["run.yaml", *flags]) == 0
    with open("cache/check.json") as file:
        return json.load(file)


def texts_of(name):
    """The documents in the training cache of a source."""
    with open("run.yaml") as file:
        config = DataConfig(**yaml.safe_load(file)["data"]).sources()[name]
    store = open_store(config, find_cache(config, "train"))
    tokens, begins, _ = store.read(np.array([0]), store.shards.tokens)
    parts = np.split(tokens[0], np.flatnonzero(begins[0]))
    tokenizer = open_tokenizer("byte")
    return [tokenizer.backend.decode(part.tolist(), skip_special_tokens=True) for part in parts if len(part)]


def test_planted_parts_and_duplicates_are_found_with_their_places(work):
    documents, planted = work
    report = run("--check-contamination", "quiz", "--include_path", "tasks")
    assert report["benchmarks"] == {"quiz": {"items": 31, "too_short": 1}}
    web, books = report["sources"]["web/train"], report["sources"]["books/train"]
    found = {
        (found["document"].rpartition(":")[2], found["item"], found["character"], found["words"])
        for found in web["overlaps"]
    }
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents["web"])
    assert len(lines.encode()) > 20_000  # several shards
    assert found == {(str(place + 1), item, at, words) for place, (item, at, words) in planted.items()}
    assert web["contaminated"] == {"quiz": {"documents": len(planted), "items": len(planted)}}
    assert web["contaminated_tokens"] == sum(len(documents["web"][place].encode()) + 1 for place in planted)
    (overlap,) = books["overlaps"]
    assert (overlap["item"], overlap["words"]) == (20, 10 + 1 + 4)
    assert web["duplicates"] == {"web/train": 1}
    assert books["duplicates"] == {"web/train": 1, "web/validation": 1}
    assert report["sources"]["web/validation"]["duplicates"] == {}
    assert texts_of("web") == documents["web"]


def test_documents_are_dropped_only_if_asked(work):
    documents, planted = work
    run("--check-contamination", "quiz", "--include_path", "tasks", "--drop", "--drop-duplicates")
    kept = [text for place, text in enumerate(documents["web"]) if place not in planted and place != 149]
    assert texts_of("web") == kept
    kept = [text for place, text in enumerate(documents["books"]) if place not in (7, 100, 120)]
    assert texts_of("books") == kept


def test_a_cache_is_used_as_it_was_built_and_says_so(work, caplog):
    documents, _ = work
    with caplog.at_level("INFO"):
        run("--drop-duplicates")
        assert "cache/books/train: 2 documents of " in caplog.text
        assert preprocess.run(["run.yaml"]) == 0
    assert "cache/books/train: without 2 documents (" in caplog.text
    assert len(texts_of("web")) == len(documents["web"]) - 1
    with pytest.raises(UserError, match=r"dropped.contamination.ngram: "):
        run("--check-contamination", "quiz", "--include_path", "tasks", "--drop")


def test_a_part_of_the_cache_without_the_documents_is_not_completed_with_them(work):
    run("--drop-duplicates")
    os.remove("cache/web/train/manifest.json")
    with pytest.raises(UserError, match=r"dropped.duplicates: "):
        preprocess.run(["run.yaml"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drop"], "--drop: "),
        (["--check-contamination", ","], "--check-contamination: "),
        (["--check-duplicates", "--dry-run"], "--dry-run"),
    ],
)
def test_wrong_flags_are_refused(work, flags, message):
    with pytest.raises(UserError, match=message):
        preprocess.run(["run.yaml", *flags])
