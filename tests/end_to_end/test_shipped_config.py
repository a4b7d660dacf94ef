"""A shipped config with its data, sizes and steps changed on the command line, as a user tries it out first."""

import json

from conftest import TOKENIZER, TRAIN_FILES, VALIDATION_FILES

SMALL = [
    *("--model.hidden_dim", 32, "--model.num_heads", 2, "--model.num_layers", 2, "--model.seq_len", 32),
    *("--trainer.num_train_steps", 2, "--trainer.train_batch_size", 4, "--trainer.per_device_parallelism", 2),
    *("--trainer.tracker", "{type: json}", "--trainer.id", "tiny", "--trainer.max_eval_batches", 2),
]
DATA = [
    *("--data.train_urls", json.dumps(TRAIN_FILES), "--data.validation_urls", json.dumps(VALIDATION_FILES)),
    *("--data.tokenizer", TOKENIZER),
]


def test_gpt2_small_trains_on_other_text_and_is_evaluated(lmtrain, tmp_path):
    trained = lmtrain("train", "config/gpt2_small.yaml", *SMALL, *DATA)
    assert trained.returncode == 0, trained.stderr
    assert "note: --data.train_urls: replaces data.id of " in trained.stderr
    assert (tmp_path / "checkpoints" / "tiny" / "step-2").is_dir()
    assert "hidden_dim: 32" in (tmp_path / "logs" / "tiny" / "config.yaml").read_text()
    logged = [json.loads(line) for line in (tmp_path / "logs" / "tiny.metrics.jsonl").read_text().splitlines()]
    (during,) = [line["eval/loss"] for line in logged if "eval/loss" in line]

    evaluated = lmtrain("eval", "--config_path", "gpt2_small", *SMALL, *DATA)
    assert evaluated.returncode == 0, evaluated.stderr
    result = json.loads(evaluated.stdout)
    assert (result["step"], result["eval/loss"]) == (2, during)


def test_what_a_config_needs_and_this_version_lacks_is_told_before_anything_is_made(lmtrain, tmp_path):
    for config, what in (
        ("gpt2_small", "openwebtext.yaml:3: data.id Skylion007/openwebtext is not there yet"),
        ("llama_nano", "llama_nano.yaml:4: model.type llama is not there yet"),
        ("gpt2_nano_sophia", "sophia_h.yaml:2: optimizer.type sophia-h is not there yet"),
    ):
        refused = lmtrain("train", config)
        assert refused.returncode == 2
        assert what in refused.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
