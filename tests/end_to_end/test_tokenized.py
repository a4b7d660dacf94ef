"""Runs on files of token ids that other systems wrote: the same as on a cache, killed, resumed, and with files that
change under them."""

import json
import os

import numpy as np
import pytest
from conftest import logged, run_in_process, tiny_settings
from faults import runs
from token_files import documents, llm_c, megatron, nano_gpt

pytestmark = pytest.mark.end_to_end


def tokenized(folder, steps):
    """Settings of a mixture of three kinds of files in `folder`, the first one of several files."""
    rng = np.random.default_rng(0)
    text = [np.sort(rng.integers(0, 250, size)) for size in rng.integers(20, 200, 400)]  # something to learn
    for number in range(3):
        llm_c(folder / f"llmc_{number}.bin", text[number * 60 : number * 60 + 60])
    megatron(folder / "megatron_text_document.bin", text[180:300])
    nano_gpt(folder / "nano.bin", text[300:380])
    nano_gpt(folder / "validation.bin", text[380:])
    tokens = {"format": {"type": "tokens"}}
    settings = tiny_settings()
    settings["data"] = {
        "configs": {
            "llmc": {"train_urls": ["llmc_{0..2}.bin"], "validation_urls": ["validation.bin"], **tokens},
            "megatron": {"train_urls": ["megatron_text_document.bin"], **tokens},
            "nano": {"train_urls": ["nano.bin"], **tokens},
        },
        "tokenizer": "byte",
        "cache_dir": "cache",
        "shuffle": True,
        "num_preprocess_workers": 1,
    }
    settings["trainer"] |= {"num_train_steps": steps, "steps_per_eval": steps // 2, "max_eval_batches": None}
    settings["trainer"]["checkpointer"] = {"save_interval": None, "keep": [{"every": 10}]}
    return settings


def test_a_run_in_place_has_the_losses_of_a_run_on_a_cache(tmp_path):
    settings = tokenized(tmp_path, 10)
    rows = [[*ids.tolist(), 256] for ids in documents(number=40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    nano_gpt(tmp_path / "same.bin", documents(number=40))
    for name in ("rows.jsonl", "same.bin"):
        settings["data"] |= {"configs": None, "train_urls": [name], "format": {"type": "tokens"}, "cache_dir": name[:4]}
        settings["data"]["validation_urls"] = ["validation.bin"]
        settings["trainer"]["id"] = name[:4]
        runs.write_config(tmp_path, settings)
        run_in_process(["train", "tiny.json"], tmp_path, code=0)
    for metric in ("train/loss", "eval/loss"):
        assert logged(tmp_path, metric, "rows") == logged(tmp_path, metric, "same")


def test_a_file_that_changes_under_a_run_ends_it(tmp_path):
    settings = tokenized(tmp_path, 10)
    runs.write_config(tmp_path, settings)
    run_in_process(["train", "tiny.json", "--trainer.id", "one"], tmp_path, code=0)
    assert not list((tmp_path / "cache").glob("**/*.arrayrecord"))
    content = bytearray((tmp_path / "nano.bin").read_bytes())
    content[1000] ^= 1
    (tmp_path / "nano.bin").write_bytes(content)
    os.utime(tmp_path / "validation.bin", ns=(0, 0))  # changes nothing
    longer = ["train", "tiny.json", "--trainer.id", "one", "--trainer.num_train_steps", "20"]
    done = run_in_process(longer, tmp_path, code=2)
    assert "nano.bin has changed" in done.stderr
    assert "validation.bin has changed" not in done.stderr


@pytest.mark.long
def test_a_run_is_killed_and_resumed_with_the_same_bytes(tmp_path):
    for name in ("killed", "undisturbed"):
        folder = tmp_path / name
        folder.mkdir()
        runs.write_config(folder, tokenized(folder, 100))
    runs.finish(tmp_path / "undisturbed")
    killed = tmp_path / "killed"
    with runs.running(killed) as process:
        runs.wait_for(lambda: runs.last_logged(killed) >= 45, [process])
    saved = runs.last_saved(killed)
    assert 0 < saved < 100
    assert f"resuming after step {saved}" in runs.finish(killed)
    assert runs.differences(killed, tmp_path / "undisturbed", 100) == []
    losses = logged(killed, "eval/loss")
    assert losses[100] < losses[50] < np.log(257)
