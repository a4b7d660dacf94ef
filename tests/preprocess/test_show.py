"""What `lmtrain preprocess --show N` prints is what training reads."""

import json

import numpy as np
import pytest
from cache_building import open_built
from chat_tokenizer import MARKED, write_chat_tokenizer, write_chats
from conftest import TOKENIZER

from lmtrain.data.config import DataConfig
from lmtrain.data.windows import windows_of
from lmtrain.preprocess.show import first_documents

SEQ_LEN = 64


def conversation(words):
    return [{"role": "user", "content": "the robot " * words}, {"role": "assistant", "content": "the café"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two files of conversations, of which one is too long for a sequence, and one of text."""
    monkeypatch.chdir(tmp_path)
    write_chat_tokenizer(tmp_path / "tok", MARKED)
    write_chats(tmp_path / "a.jsonl", [conversation(words) for words in (1, 2, 40, 1, 9)])
    write_chats(tmp_path / "b.jsonl", [conversation(words) for words in (1, 3)])
    texts = ["the café", "", "a robot stands by the door " * 5, "end"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def windows_read(config):
    """The windows that training reads: a row of tokens and a row of targets of each."""
    windows = windows_of(open_built(config), SEQ_LEN)
    tokens, _, mask = windows.read(np.arange(windows.for_evaluation()), range(SEQ_LEN))
    return list(zip(tokens.tolist(), mask.tolist(), strict=True))


def sequences_of(documents):
    """Tokens and targets that are shown, by sequence."""
    ids, targets, begins = [], [], []
    for document in documents:
        begins += [len(ids) + begin for begin in document.sequences]
        ids += document.ids.tolist()
        targets += [True] * len(document.ids) if document.targets is None else document.targets.tolist()
    assert [number for document in documents for number in document.sequences.values()] == [*range(1, len(begins) + 1)]
    parts = list(zip(begins, [*begins[1:], len(ids)], strict=True))
    return [(ids[begin:end], targets[begin:end]) for begin, end in parts]


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_sequences_of_conversations_are_those_of_training(folder, too_long):
    chat = {"type": "chat", "too_long": too_long}
    config = DataConfig(train_urls=["a.jsonl", "b.jsonl"], tokenizer="tok", cache_dir="cache", format=chat)
    shown = list(first_documents(config, SEQ_LEN, 100))
    assert [document.place for document in shown] == [*(f"a.jsonl:{n}" for n in range(1, 6)), "b.jsonl:1", "b.jsonl:2"]
    sequences, read = sequences_of(shown), windows_read(config)
    assert len(sequences) == len(read) == (5 if too_long == "cut" else 4)
    for (ids, targets), (tokens, mask) in zip(sequences, read, strict=True):
        assert tokens[: len(ids)] == ids
        assert not any(tokens[len(ids) :])
        assert mask[: len(ids) - 1] == targets[1:]


def test_sequences_of_text_are_those_of_training(folder):
    config = DataConfig(train_urls=["text.jsonl"], tokenizer=str(TOKENIZER), cache_dir="cache")
    shown = list(first_documents(config, SEQ_LEN, 100))
    assert [document.length for document in shown][1] == 1  # the EOS token of an empty text
    for (ids, _), (tokens, _) in zip(sequences_of(shown), windows_read(config), strict=True):
        assert tokens[: len(ids)] == ids


def test_the_first_documents_are_shown_as_if_there_were_all(folder):
    config = DataConfig(train_urls=["a.jsonl", "b.jsonl"], tokenizer="tok", format={"type": "chat"})
    every = list(first_documents(config, SEQ_LEN, 100))
    for number in range(1, len(every)):
        for few, same in zip(first_documents(config, SEQ_LEN, number), every[:number], strict=True):
            assert (few.place, few.ids.tolist(), few.sequences) == (same.place, same.ids.tolist(), same.sequences)


CONFIG = """
data:
  cache_dir: cache
  tokenizer: tok
  configs:
    chats: {train_urls: [a.jsonl], format: {type: chat}}
    text: {train_urls: [text.jsonl]}
  train_weights: {chats: 1, text: 1}
model: {hidden_dim: 32, num_heads: 2, num_layers: 2, seq_len: 64}
"""


def test_the_command_prints_each_source_and_writes_nothing_or_names_an_empty_one(folder, run_cli):
    (folder / "c.yaml").write_text(CONFIG)
    before = sorted(folder.rglob("*"))
    done = run_cli("preprocess", "c.yaml", "--show", "3", code=0)
    assert sorted(folder.rglob("*")) == before
    blocks = done.stdout.strip("\n").split("\n\n")
    heads = [block.splitlines()[0] for block in blocks]
    places = "chats: a.jsonl:1: a.jsonl:2: a.jsonl:3: text: text.jsonl:1: text.jsonl:2: text.jsonl:3:"
    assert [head.partition(" ")[0] for head in heads] == places.split()
    assert heads[1] == "a.jsonl:1: 27 tokens, 4 targets"
    assert "[[the café<|im_end|>]]" in blocks[1].splitlines()
    (folder / "c.yaml").write_text(CONFIG.replace("text.jsonl", "empty.jsonl"))
    (folder / "empty.jsonl").touch()
    assert "empty.jsonl: no documents" in run_cli("preprocess", "c.yaml", "--show", "1", code=2).stderr
