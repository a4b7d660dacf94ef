"""Shipped configs with data, sizes and steps changed on the command line, as in a first trial."""

import json
from pathlib import Path

import pytest
from conftest import TOKENIZER, TRAIN_FILES, VALIDATION_FILES

SMALL = [
    *("--model.hidden_dim", 32, "--model.num_heads", 2, "--model.num_layers", 2, "--model.seq_len", 32),
    *("--trainer.num_train_steps", 2, "--trainer.train_batch_size", 4, "--trainer.per_device_parallelism", 2),
    *("--trainer.tracker", "{type: json}", "--trainer.id", "tiny", "--trainer.max_eval_batches", 2),
]
SOURCES = {"train_urls": TRAIN_FILES, "validation_urls": VALIDATION_FILES, "tokenizer": str(TOKENIZER)}
DATA = [
    *("--data.train_urls", json.dumps(TRAIN_FILES), "--data.validation_urls", json.dumps(VALIDATION_FILES)),
    *("--data.tokenizer", TOKENIZER),
]


@pytest.mark.long
def test_gpt2_small_trains_on_other_text_and_is_evaluated(run_cli, tmp_path):
    trained = run_cli("train", "config/gpt2_small.yaml", *SMALL, *DATA)
    assert trained.returncode == 0, trained.stderr
    assert "note: --data.train_urls: replaces data.id of " in trained.stderr
    assert (tmp_path / "checkpoints" / "tiny" / "step-2").is_dir()
    assert "hidden_dim: 32" in (tmp_path / "logs" / "tiny" / "config.yaml").read_text()
    logged = [json.loads(line) for line in (tmp_path / "logs" / "tiny.metrics.jsonl").read_text().splitlines()]
    (during,) = [line["eval/loss"] for line in logged if "eval/loss" in line]

    evaluated = run_cli("eval", "--config_path", "gpt2_small", *SMALL, *DATA)
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads(evaluated.stdout)
    assert (result["step"], result["eval/loss"]) == (2, during)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sophia-g", "lion", "muon", "adafactor"])
def test_every_optimizer_trains_from_the_command_line(run_cli, tmp_path, optimizer):
    more = ["--model.hidden_dim", 128, "--trainer.model_averaging", "{beta: 0.5}", "--optimizer.type", optimizer]
    done = run_cli("train", "gpt2_small", *SMALL, *DATA, *more)
    assert done.returncode == 0, done.stderr
    assert "average " in done.stderr


def test_without_a_network_a_hub_name_is_an_immediate_error_with_advice(run_cli, tmp_path):
    for flags, what in (
        (DATA[:2], "tokenizer 'gpt2': not found locally or on the Hugging Face Hub"),
        (DATA[-2:], "data.id: Skylion007/openwebtext: not found locally or on the Hugging Face Hub"),
    ):
        refused = run_cli("train", "gpt2_small", "--data.cache_dir", "cache", *flags)
        assert refused.returncode == 2
        assert f"lmtrain: error: {what}" in refused.stderr
        assert "offline, " in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "cache").exists()


@pytest.mark.long
def test_the_first_config_trains_on_a_data_set_named_by_a_shipped_fragment(run_cli, tmp_path):
    """`--data "include data/wikitext103.yaml"`, with a local folder instead of the data set on the hub."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name, file in (("train", TRAIN_FILES[0]), ("validation", VALIDATION_FILES[0])):
        (folder / f"{name}.jsonl").write_bytes(Path(file).read_bytes())
    data = ["--data", "include data/wikitext103.yaml", "--data.id", folder, "--data.tokenizer", TOKENIZER]
    trained = run_cli("train", "gpt2_nano", *data, *SMALL, "--data.cache_dir", "cache")
    assert trained.returncode == 0, trained.stderr
    assert "wikitext103.yaml:2: replaces data.demo of " in trained.stderr
    assert "step 2: eval loss" in trained.stderr
    again = run_cli("train", "gpt2_nano", *data, *SMALL, "--data.cache_dir", "cache", "--trainer.num_train_steps", 3)
    assert again.returncode == 0, again.stderr
    assert "resuming after step 2" in again.stderr


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", []),
        pytest.param("mpt", [], marks=pytest.mark.long),
        pytest.param("backpack", ["--model.num_senses", 4], marks=pytest.mark.long),
    ],
)
def test_the_small_model_of_every_family_trains_and_is_exported(run_cli, tmp_path, family, more):
    flags = ["--hf_save_path", "exports", "--data", json.dumps(SOURCES), "--trainer.steps_per_eval", 100]
    trained = run_cli("train", f"{family}_nano", *SMALL, *flags, *more)
    assert trained.returncode == 0, trained.stderr
    assert f"{family}, " in trained.stderr
    files = sorted(path.name for path in (tmp_path / "exports" / "tiny" / "step-2").iterdir())
    assert ("modeling_backpack.py" in files) == (family == "backpack")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
