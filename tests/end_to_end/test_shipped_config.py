"""Shipped configs with data, sizes and steps changed on the command line, as in a first trial."""

import json
from pathlib import Path

import pytest
from conftest import TOKENIZER, TRAIN_FILES, VALIDATION_FILES, logged

SMALL = [
    *("--model.hidden_dim", 32, "--model.num_heads", 2, "--model.num_layers", 2, "--model.seq_len", 32),
    *("--trainer.num_train_steps", 2, "--trainer.train_batch_size", 4, "--trainer.per_device_parallelism", 2),
    *("--trainer.tracker", "{type: json}", "--trainer.id", "tiny", "--trainer.max_eval_batches", 2),
]
SOURCES = {"train_urls": TRAIN_FILES, "validation_urls": VALIDATION_FILES, "tokenizer": str(TOKENIZER)}


def test_without_a_network_a_hub_name_is_an_immediate_error_with_advice(run_cli, tmp_path):
    for flags, what in (
        (["--data.train_urls", "[x.jsonl]"], "tokenizer 'gpt2': "),
        (["--data.tokenizer", TOKENIZER], "data.id: Skylion007/openwebtext: "),
    ):
        refused = run_cli("train", "gpt2_small", "--data.cache_dir", "cache", *flags, code=2)
        assert f"lmtrain: error: {what}" in refused.stderr
        assert "offline, " in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("mpt", "backpack"))]
)
def test_the_small_model_of_every_family_trains_and_is_exported(run_cli, tmp_path, family):
    flags = ["--hf_save_path", "exports", "--data", json.dumps(SOURCES), "--trainer.steps_per_eval", 100]
    more = ["--model.num_senses", 4] if family == "backpack" else []
    assert f"{family}, " in run_cli("train", f"{family}_nano", *SMALL, *flags, *more, code=0).stderr
    files = sorted(path.name for path in (tmp_path / "exports" / "tiny" / "step-2").iterdir())
    assert ("modeling_backpack.py" in files) == (family == "backpack")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)


@pytest.mark.long
def test_gpt2_small_trains_on_other_text_and_is_evaluated(run_cli, tmp_path):
    data = [word for name, value in SOURCES.items() for word in (f"--data.{name}", json.dumps(value))]
    trained = run_cli("train", "config/gpt2_small.yaml", *SMALL, *data, code=0)
    assert "note: --data.train_urls: replaces data.id of " in trained.stderr
    assert (tmp_path / "checkpoints" / "tiny" / "step-2").is_dir()
    assert "hidden_dim: 32" in (tmp_path / "logs" / "tiny" / "config.yaml").read_text()
    (during,) = logged(tmp_path, "eval/loss", "tiny").values()

    result = json.loads(run_cli("eval", "--config_path", "gpt2_small", *SMALL, *data, code=0).stdout)
    assert (result["step"], result["eval/loss"]) == (2, during)


@pytest.mark.long
def test_the_first_config_trains_on_a_data_set_named_by_a_shipped_fragment(run_cli, tmp_path):
    """`--data "include data/wikitext103.yaml"`, with a local folder instead of the data set on the hub."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name, file in (("train", TRAIN_FILES[0]), ("validation", VALIDATION_FILES[0])):
        (folder / f"{name}.jsonl").write_bytes(Path(file).read_bytes())
    data = ["--data", "include data/wikitext103.yaml", "--data.id", folder, "--data.tokenizer", TOKENIZER]
    trained = run_cli("train", "gpt2_nano", *data, *SMALL, "--data.cache_dir", "cache", code=0)
    assert "wikitext103.yaml:2: replaces data.demo of " in trained.stderr
    assert "step 2: eval loss" in trained.stderr
    again = run_cli(
        "train", "gpt2_nano", *data, *SMALL, "--data.cache_dir", "cache", "--trainer.num_train_steps", 3, code=0
    )
    assert "resuming after step 2" in again.stderr
