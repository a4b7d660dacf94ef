"""The pages on fine-tuning lead, read in their order, from a base model and conversations to a chat model that answers
in transformers.
"""

import io
import json
import random

import pytest
from pages import ROOT, blocks, follow, run_as_written, write_own_text

from lmtrain.hf.tokenizer import load_tokenizer

GUIDES = ROOT / "configs" / "guide"
# The README trains a real model; here it is a tiny one of the same family.
TINY = ["--model", "{hidden_dim: 128, num_heads: 4, num_layers: 2, seq_len: 256}"]
TINY += ["--trainer.num_train_steps", "20", "--trainer.train_batch_size", "8"]
ACCURACY = "eval/preferences/rewards/accuracies"
ANSWERS = {"Who counts the stars?": "Nobody.", "Who closes the door?": "The robot.", "Where is it?": "By the river."}


def conversations(number, seed):
    dice = random.Random(seed)
    for _ in range(number):
        messages = []
        for question in dice.sample(sorted(ANSWERS), dice.randint(1, 2)):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": ANSWERS[question]})
        yield {"messages": messages}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with 200 conversations and with `my_model`, which the README exports."""
    write_own_text(tmp_path)
    (tmp_path / "chats").mkdir()
    for name, number in (("train", 200), ("validation", 40)):
        rows = [json.dumps(row) + "\n" for row in conversations(number, name)]
        (tmp_path / "chats" / f"{name}.jsonl").write_text("".join(rows))
    readme = blocks(ROOT / "README.md", "yaml", "bash")
    (tmp_path / "my.yaml").write_text(next(text for _, text in readme if text.startswith("# my.yaml")))
    (commands,) = (text for _, text in readme if text.startswith("lmtrain tokenizer train"))
    for command in commands.splitlines():
        if command.split()[1] in ("tokenizer", "train", "export-hf"):
            run_as_written(tmp_path, command, [] if command.split()[1] == "tokenizer" else TINY)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # of a conversation: it ends
    return tmp_path


@pytest.mark.long
def test_the_guide_leads_to_a_chat_model_that_answers_in_transformers(folder):
    (folder / "pairs").mkdir()
    for name, number in (("train", 200), ("validation", 40)):
        rows = [json.dumps(row) + "\n" for row in pairs_of_answers(number, name)]
        (folder / "pairs" / f"{name}.jsonl").write_text("".join(rows))
    # the quickstarts have tests of their own
    page = GUIDES / "finetuning.md"
    outputs = dict(follow(folder, page, skip=["bash tools/quickstart"], short=["lmtrain train chat_lora.yaml"]))
    assert "[[Nobody.<|im_end|>]]" in outputs["lmtrain preprocess chat.yaml --show 2"]
    assert json.loads(outputs["lmtrain eval chat.yaml"])["eval/loss"] < 0.5
    assert outputs['lmtrain generate chat.yaml --chat --prompt "Who counts the stars?"'] == "Nobody.\n"
    assert outputs["ask.py"].splitlines()[-1] == "Nobody."
    end = load_tokenizer(str(folder / "my_chat_model")).backend.token_to_id("<|im_end|>")
    for name in ("my_chat_model", "my_merged_model"):
        generation = json.loads((folder / name / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [end, 0]  # of the base: <|endoftext|>
    assert (folder / "my_adapter" / "adapter_model.safetensors").exists()
    assert ", rejected: " in outputs["lmtrain preprocess pairs.yaml --show 2"]
    assert outputs['lmtrain generate pairs.yaml --chat --prompt "Who counts the stars?"'] == "Nobody.\n"
    for log in (folder / "logs").glob("pairs*.metrics.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        accuracies = [line[ACCURACY] for line in lines if ACCURACY in line]
        assert accuracies[-1] > 0.9, log
    assert (folder / "my_tuned_adapter" / "adapter_model.safetensors").exists()
    dict(follow(folder, GUIDES / "distillation.md", short=["lmtrain train small.yaml"]))
    assert (folder / "my_small_model" / "model.safetensors").exists()


def pairs_of_answers(number, seed):
    dice = random.Random(seed)
    for _ in range(number):
        question, other = dice.sample(sorted(ANSWERS), 2)
        answers = {"chosen": ANSWERS[question], "rejected": ANSWERS[other]}
        row = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        yield {"prompt": [{"role": "user", "content": question}], **row}
