"""Training on conversations, mixed with text; the loss is that of transformers; the model is talked to."""

import io
import json
import math
import re
import shutil
import signal
import subprocess
import sys

import openai
import pytest
import torch
import yaml
from chat_tokenizer import CONVERSATION, MARKED, write_chat_tokenizer, write_chats
from conftest import TRAIN_FILES, VALIDATION_FILES, logged, run_in_process, tiny_settings
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
        (folder / f"{command[0]}.txt").write_text(run_in_process(command, folder, code=0).stderr)
    return folder


def test_the_loss_on_conversations_is_that_of_transformers_with_the_same_mask(trained):
    (line,) = [line for line in (trained / "train.txt").read_text().splitlines() if "tokens are targets" in line]
    assert "of chats" in line
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
    done = run_in_process(["eval", "chat.yaml", "--trainer.max_eval_batches", "100"], trained, code=0)
    metrics = json.loads(done.stdout)
    assert metrics["eval/chats/loss"] == pytest.approx(total / count, abs=1e-4)
    assert metrics["eval/text/loss"] > 0


def talk(folder, monkeypatch, lines, *arguments, code=0):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode("latin-1")), "utf-8"))
    done = run_in_process(["generate", *arguments, "--chat", "--max_new_tokens", "12"], folder, code)
    return done.stdout if code == 0 else done.stderr


def test_each_line_gets_a_reply_and_clear_starts_again(trained, monkeypatch):
    """A message that fills the context or is not UTF-8 is an error and is not kept."""
    lines = f"{'stars ' * LENGTH}\ncaf\u00e9\nStars?\nRain?\n/clear\nStars?\n"
    first = talk(trained, monkeypatch, lines, "chat.yaml", "--temperature", "0")
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
    of_export = talk(trained, monkeypatch, "Stars?\n/exit\nRain?\n", "--hf", "model", "--temperature", "0")
    assert of_export == f"{expected[0]}\n"


def test_the_web_server_has_the_replies_of_the_terminal(trained, monkeypatch):
    (expected,) = talk(trained, monkeypatch, "Stars?\n", "chat.yaml", "--temperature", "0").splitlines()
    command = [sys.executable, "-m", "lmtrain", "generate", "chat.yaml", "--chat", "--web", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--temperature", "0", "--max_new_tokens", "12"], cwd=trained, stderr=subprocess.PIPE, text=True
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
            break
    assert found, lines
    with openai.OpenAI(base_url=found[0], api_key="none") as client:
        messages = [{"role": "user", "content": "Stars?"}]
        assert client.chat.completions.create(model="", messages=messages).choices[0].message.content == expected
    taken = run_in_process(["generate", "chat.yaml", "--chat", "--web", "--port", found[1]], trained, 2)
    assert f"--port {found[1]}: " in taken.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 0


def test_a_missing_or_wrong_template_ends_a_chat(trained, monkeypatch):
    shutil.copytree(trained / "model", trained / "plain")
    (trained / "plain" / "chat_template.jinja").unlink()
    (trained / "bad.jinja").write_text("a\n{{ 1 / 0 }}")
    for arguments, named in (
        (["chat.yaml", "--chat_template", "nothing"], "--chat_template: nothing"),
        (["chat.yaml", "--chat_template", "{{ messages"], "--chat_template, line 1: "),
        (["chat.yaml", "--chat_template", "bad.jinja"], "bad.jinja:2: "),
        (["--hf", "plain"], "--chat_template"),
    ):
        assert named in talk(trained, monkeypatch, "Stars?\n", *arguments, code=2)


@pytest.fixture
def chat_config(tmp_path, settings, write_config):
    """`chat_config(template, first)` writes a config with conversations; the first line of its data is `first`."""

    def write(template, first=""):
        write_chat_tokenizer(tmp_path / "tokenizer", template)
        data = write_chats(tmp_path / "train.jsonl", CHATS)
        data.write_text(f"{first}\n{data.read_text()}")
        format = {"type": "chat"}
        settings["data"] = {"tokenizer": "tokenizer", "cache_dir": "c", "train_urls": ["train.jsonl"], "format": format}
        return write_config(settings)

    return write


def test_a_syntax_error_of_a_template_is_found_before_data_is_read(chat_config, run_cli, tmp_path):
    chat_config("{% for m in messages %}\n{{ m.content }\n{% endfor %}", first="{broken")
    for command in ("train", "preprocess"):
        done = run_cli(command, "tiny.yaml", code=2)
        assert "tokenizer/chat_template.jinja:2: " in done.stderr
        assert "train.jsonl" not in done.stderr
        assert not (tmp_path / "c" / "train").exists()


@pytest.mark.parametrize(
    ("template", "flags", "cause"),
    [
        ("a\n{{ 1 / 0 }}", ["error"], "division by zero"),
        # without end: not tried for one record after another
        ("a\n{{ 'a' * 10**10 }}", ["skip", "--data.max_bad_fraction", "1"], "1,024 MiB"),
    ],
)
def test_a_template_that_fails_in_a_worker_is_an_error_with_both_lines(chat_config, run_cli, template, flags, cause):
    chat_config(template)
    last = run_cli("preprocess", "tiny.yaml", "--data.on_bad_record", *flags, code=2).stderr.splitlines()[-1]
    for part in ("train.jsonl:2: ", "tokenizer/chat_template.jinja:2: ", cause):
        assert part in last


def test_the_template_of_the_training_data_is_that_of_exports(tmp_path, trained):
    """Also if its file is gone: the run keeps it."""
    (tmp_path / "qa.jinja").write_text(
        "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
    )
    settings = yaml.safe_load((trained / "chat.yaml").read_text())
    for source in settings["data"]["configs"].values():
        for split in ("train_urls", "validation_urls"):
            source[split] = [str(trained / url) for url in source[split]]
    settings["data"]["configs"]["chats"]["format"]["chat_template"] = "qa.jinja"
    settings["data"]["tokenizer"] = str(trained / "tokenizer")
    settings["trainer"] |= {"id": "qa", "num_train_steps": 2}
    settings |= {"hf_save_path": "exports"}
    (tmp_path / "qa.yaml").write_text(yaml.safe_dump(settings))
    run_in_process(["train", "qa.yaml"], tmp_path, code=0)
    template = (tmp_path / "qa.jinja").read_text()
    (tmp_path / "qa.jinja").unlink()
    run_in_process(["export-hf", "qa.yaml", "--output", "model"], tmp_path, code=0)
    for folder in ("exports/qa/step-2", "model", "logs/qa/tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert tokenizer.chat_template == template
        asked = tokenizer.apply_chat_template(CONVERSATION[1:2], tokenize=False, add_generation_prompt=True)
        assert asked.endswith("A: ")


@pytest.mark.long
def test_it_resumes_with_the_losses_of_an_undisturbed_run(trained):
    before = logged(trained, "train/loss", "talks")
    assert len(before) == 12
    assert all(math.isfinite(loss) for loss in before.values())
    again = ["train", "chat.yaml", "--trainer.id", "again"]
    run_in_process([*again, "--trainer.num_train_steps", "7"], trained, code=0)
    assert "resuming after step 7" in run_in_process(again, trained, code=0).stderr
    assert logged(trained, "train/loss", "again") == before
