"""User errors: one clear message, exit code 2, no traceback, before time is spent, no partially written files."""

import os

import pytest
import yaml
from chat_tokenizer import CONVERSATION, write_chat_tokenizer, write_chats
from conftest import logged

pytestmark = pytest.mark.end_to_end

ASKED = [{"role": "user", "content": "Who counts?"}]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--data.train_urls", "[absent.jsonl]"], ["no such file", "absent.jsonl"]),
        (["--data.train_urls", "['part.{1..3.jsonl']"], ["unbalanced braces"]),
        (["--data.train_urls", "['.']"], [".: is a folder"]),
        (["--data.cache_dir", "tiny.yaml"], ["data.cache_dir: tiny.yaml/train cannot be created: "]),
        (["--data.tokenizer", "no/such/folder"], ["no such folder", "lmtrain tokenizer train"]),
        (["--model.hidden_dim", "4194304", "--model.num_heads", "64"], ["the training state needs"]),
        (["--trainer.model_axis_size", "2"], ["trainer.model_axis_size", "1 device"]),
        (["--trainer.checkpointer.base_path", "tiny.yaml"], ["trainer.checkpointer.base_path"]),
        (["--trainer.load_checkpoint", "true"], ["trainer.load_checkpoint: no complete checkpoint"]),
        (["--trainer.initialize_from", "nosuch"], ["trainer.initialize_from: checkpoint nosuch: "]),
        (["--trainer.sample_prompts", f"[{'the robot ' * 40}]"], ["trainer.sample_prompts"]),
        (["--hf_save_path", "tiny.yaml"], ["hf_save_path: tiny.yaml/", " cannot be created: "]),
        (["--initialize_from_checkpoint_path", "elsewhere", "--lora", "{r: 33, base_dtype: float32}"], ["lora.r: 33"]),
        (["--trainer.tracker", "{type: wandb, mode: disabled, save_xla_dumps: true}"], ["tracker.save_xla_dumps: "]),
    ],
)
def test_a_wrong_setting_is_found_before_text_is_tokenized(run_cli, settings, write_config, tmp_path, flags, expected):
    write_config(settings)
    done = run_cli("train", "tiny.yaml", *flags, code=2)
    for part in expected:
        assert part in done.stderr
    assert set(os.listdir(tmp_path)) <= {"tiny.yaml", "logs"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trainer.train_batch_size", "50000"], ["train_batch_size: 50,000"]),
        *(
            (["--data.validation_urls", "null", f"--trainer.{name}", "{}"], [f"{name}: ", "data.validation_urls"])
            for name in ("early_stopping", "checkpointer.keep_best")
        ),
    ],
)
def test_what_the_data_must_show_is_found_before_the_first_step(
    run_cli, settings, write_config, tmp_path, flags, expected
):
    write_config(settings)
    done = run_cli("train", "tiny.yaml", *flags, code=2)
    for part in expected:
        assert part in done.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_an_unavailable_platform_is_an_error(lmtrain, settings, write_config, tmp_path, monkeypatch):
    write_config(settings)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    last = lmtrain("train", "tiny.yaml", code=2).stderr.splitlines()[-1]
    assert last.startswith("lmtrain: error: JAX_PLATFORMS=cuda: ")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("name", ["steps_per_eval", pytest.param("validation_urls", marks=pytest.mark.long)])
def test_a_run_without_evaluation_is_valid(run_cli, settings, write_config, tmp_path, name):
    """An existing validation cache is ignored. An empty section `lora` is logged once, as is the layout."""
    settings["trainer"]["id"] = "one"
    settings["lora"] = None
    write_config(settings)
    run_cli("preprocess", "tiny.yaml", code=0)
    settings["trainer" if name == "steps_per_eval" else "data"][name] = None
    write_config(settings)
    printed = run_cli("train", "tiny.yaml", code=0).stderr
    assert printed.count("lora: is null") == printed.count("device(s), mesh") == 1
    assert logged(tmp_path, "train/loss")
    assert not logged(tmp_path, "eval/loss")


def test_a_source_without_documents_is_refused(run_cli, settings, write_config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    settings["data"]["train_urls"] = ["empty.jsonl"]
    write_config(settings)
    for command in ("preprocess", "train"):
        done = run_cli(command, "tiny.yaml", code=2)
        assert "cache/train: no documents in empty.jsonl" in done.stderr
        assert "complete," not in done.stderr


@pytest.fixture
def chats(tmp_path, settings):
    """`chats(conversations, **format)` writes chat.yaml with these conversations as training and validation data."""

    def write(conversations, **format):
        write_chat_tokenizer(tmp_path / "tokenizer")
        write_chats(tmp_path / "train.jsonl", conversations)
        write_chats(tmp_path / "validation.jsonl", [CONVERSATION] * 4)
        settings["data"] = {
            "tokenizer": "tokenizer",
            "cache_dir": "cache",
            "train_urls": ["train.jsonl"],
            "validation_urls": ["validation.jsonl"],
            "format": {"type": "chat", **format},
        }
        settings["model"]["seq_len"] = 128
        settings["trainer"] |= {"steps_per_eval": 100, "num_train_steps": 3}
        (tmp_path / "chat.yaml").write_text(yaml.safe_dump(settings))
        return settings

    return write


@pytest.mark.parametrize("command", ["train", "preprocess"])
def test_conversations_without_an_assistant_are_refused(run_cli, chats, tmp_path, command):
    chats([ASKED] * 20)
    for _ in range(2):  # also with the shards of the first try
        printed = run_cli(command, "chat.yaml", code=2).stderr
        assert "cache/train: none of the 20 documents in train.jsonl has a target" in printed
        assert not (tmp_path / "checkpoints").exists()
        assert not (tmp_path / "cache" / "train" / "manifest.json").exists()


def test_targets_that_are_all_cut_off_are_refused_before_the_first_step(run_cli, chats, tmp_path):
    long = [{"role": "user", "content": "Who counts the stars? " * 30}, {"role": "assistant", "content": "Nobody."}]
    chats([long] * 10 + [CONVERSATION] * 10)
    done = run_cli("train", "chat.yaml", "--data.max_sequences_without_targets", "8", code=2)
    assert "cache/train (train.jsonl): no target token in the first 8 sequences" in done.stderr
    assert "10 documents are longer than model.seq_len 128" in done.stderr
    assert not (tmp_path / "logs" / "chat.metrics.jsonl").exists()
    run_cli("train", "chat.yaml", code=0)  # 1,000 by default: the conversations after them have targets


def test_validation_data_without_targets_is_refused(run_cli, chats, tmp_path):
    chats([CONVERSATION] * 20, too_long="drop")
    write_chats(tmp_path / "validation.jsonl", [[*ASKED, {"role": "assistant", "content": "The robot. " * 60}]] * 4)
    done = run_cli("train", "chat.yaml", code=2)
    assert "cache/validation (validation.jsonl): no target token" in done.stderr
    assert "model.seq_len" in done.stderr


def test_a_source_without_targets_may_have_weight_0(run_cli, chats, tmp_path):
    data = chats([CONVERSATION] * 20)["data"]
    write_chats(tmp_path / "without.jsonl", [ASKED] * 5)
    data["configs"] = {"good": {name: data.pop(name) for name in ("train_urls", "validation_urls", "format")}}
    data["configs"]["bad"] = {"train_urls": ["without.jsonl"], "format": {"type": "chat"}}
    data["train_weights"] = {"good": 1, "bad": 0}
    settings = yaml.safe_load((tmp_path / "chat.yaml").read_text())
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(settings | {"data": data}))
    run_cli("train", "chat.yaml", code=0)
    done = run_cli("train", "chat.yaml", "--data.train_weights.bad", "1", code=2)
    assert "cache/bad/train: none of the 5 documents in without.jsonl has a target" in done.stderr
