"""Training on conversations, mixed with text; the loss is that of transformers; the model is talked to."""

import json
import math

import pytest
import torch
import yaml
from chat_tokenizer import CONVERSATION, MARKED, write_chat_tokenizer, write_chats
from conftest import TRAIN_FILES, VALIDATION_FILES, run_in_process, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.end_to_end

LENGTH = 128
CHATS = [
    CONVERSATION,
    CONVERSATION[1:3],
    [{"role": "user", "content": "Who sees rain?"}, {"role": "assistant", "content": "The quiet robot sees the rain."}],
    [{"role": "user", "content": "Stars?"}, {"role": "assistant", "content": "Not today."}] * 2,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with chat.yaml, trained for 12 steps on a mixture of conversations and text, and its export."""
    folder = tmp_path_factory.mktemp("trained")
    write_chat_tokenizer(folder / "tokenizer", MARKED)
    write_chats(folder / "train.jsonl", CHATS * 20)
    write_chats(folder / "validation.jsonl", CHATS[1:])
    settings = tiny_settings()
    settings["data"] = {
        "tokenizer": "tokenizer",
        "cache_dir": "cache",
        "configs": {
            "chats": {
                "train_urls": ["train.jsonl"],
                "validation_urls": ["validation.jsonl"],
                "format": {"type": "chat"},
            },
            "text": {"train_urls": TRAIN_FILES[:1], "validation_urls": VALIDATION_FILES},
        },
    }
    settings["model"]["seq_len"] = LENGTH
    settings["trainer"]["id"] = "talks"
    settings["optimizer"]["lr_schedule"] = "constant"  # so that a run of fewer steps has the same beginning
    (folder / "chat.yaml").write_text(yaml.safe_dump(settings))
    for command in (["train", "chat.yaml"], ["export-hf", "chat.yaml", "--output", "model"]):
        done = run_in_process(command, folder)
        assert done.returncode == 0, done.stderr
        (folder / f"{command[0]}.txt").write_text(done.stderr)
    return folder


def test_the_log_has_the_number_of_targets_of_each_source(trained):
    output = (trained / "train.txt").read_text()
    (line,) = [line for line in output.splitlines() if "tokens are targets" in line]
    assert "of chats" in line


def test_the_loss_on_conversations_is_that_of_transformers_with_the_same_mask(trained):
    model = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    total = count = 0
    for chat in CHATS[1:]:
        found = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"], dtype=torch.bool)
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        losses = -log_probs[torch.arange(len(ids) - 1), ids[1:]]
        total += losses[mask[1:]].double().sum().item()
        count += int(mask[1:].sum())
    done = run_in_process(["eval", "chat.yaml", "--trainer.max_eval_batches", "100"], trained)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert metrics["eval/chats/loss"] == pytest.approx(total / count, abs=1e-4)
    assert metrics["eval/text/loss"] > 0


@pytest.mark.long
def test_it_resumes_with_the_losses_of_an_undisturbed_run(trained):
    before = losses(trained)
    assert len(before) == 12
    assert all(math.isfinite(loss) for loss in before.values())
    again = ["train", "chat.yaml", "--trainer.id", "again"]
    stopped = run_in_process([*again, "--trainer.num_train_steps", "7"], trained)
    assert stopped.returncode == 0, stopped.stderr
    resumed = run_in_process(again, trained)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(trained, "again") == before


def losses(folder, run="talks"):
    lines = map(json.loads, (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_the_export_has_the_chat_template(trained):
    assert (trained / "model" / "chat_template.jinja").read_text() == MARKED
    assert (trained / "logs" / "talks" / "tokenizer" / "chat_template.jinja").read_text() == MARKED


def talk(folder, monkeypatch, lines, *arguments, code=0):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    done = run_in_process(["generate", *arguments, "--chat", "--max_new_tokens", "12"], folder)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_each_line_gets_a_reply_and_clear_starts_again(trained, monkeypatch):
    first = talk(trained, monkeypatch, "Stars?\nRain?\n/clear\nStars?\n", "chat.yaml", "--temperature", "0")
    model = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    messages, expected = [], []
    for text in ("Stars?", "Rain?"):
        messages.append({"role": "user", "content": text})
        found = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        end = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        output = model.generate(**found, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=end[0])
        reply = tokenizer.decode(output[0, found["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": reply})
        expected.append(reply)
    assert first == "".join(f"{reply}\n" for reply in (*expected, expected[0]))
    assert (
        talk(trained, monkeypatch, "Stars?\n/exit\nRain?\n", "--hf", "model", "--temperature", "0")
        == f"{expected[0]}\n"
    )


def test_a_conversation_that_fills_the_context_is_an_error_and_is_not_kept(trained, monkeypatch):
    long = "stars " * LENGTH
    alone = talk(trained, monkeypatch, "Stars?\n", "chat.yaml", "--temperature", "0")
    after = talk(trained, monkeypatch, f"{long}\nStars?\n", "chat.yaml", "--temperature", "0")
    assert after == alone


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat.yaml", "--chat_template", "nothing"], ["--chat_template: nothing"]),
        (["--hf", "plain"], ["--chat_template", "no default chat template"]),
    ],
)
def test_a_missing_template_is_an_error(trained, monkeypatch, arguments, words):
    if not (trained / "plain").exists():
        import shutil

        shutil.copytree(trained / "model", trained / "plain")
        (trained / "plain" / "chat_template.jinja").unlink()
    output = talk(trained, monkeypatch, "", *arguments, code=2)
    for word in words:
        assert word in output
