"""Models from Hugging Face in a run: invalid configs are reported, and a resumed run does not need its base model."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import TOKENIZER, run_in_process

from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer
from lmtrain.config.load import Loaded
from lmtrain.data.config import DataConfig
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run
from lmtrain.train.start.hf_model import check_tokens, config_of, hf_settings, resolve_hf

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "gpt2", "n_embd": 0, "n_inner": 64},
        {"model_type": "gpt2", "n_embd": 32, "n_inner": "x"},
        {**LLAMA, "rope_scaling": "linear"},
        {**LLAMA, "rope_parameters": 3},
        {**LLAMA, "rope_theta": "abc"},
        {"model_type": "mpt", "attn_config": 3},
        {**LLAMA, "num_hidden_layers": None},
    ],
)
def test_an_invalid_value_is_reported_with_the_model(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"^{tmp_path}: "):
        config_of(str(tmp_path))


def test_quantized_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="quantization_config"):
        hf_settings(str(tmp_path))


def test_an_error_names_the_setting_by_its_full_path(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "activation_function": "tanh"}))
    with pytest.raises(UserError, match=r"gives model\.activation_function: "):
        config_of(str(tmp_path))


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(UserError, match=r"is a folder.* remove @main"):
        hf_settings(f"{tmp_path}@main")


def with_vocab(folder, change):
    """The tests' tokenizer with a changed vocabulary."""
    shutil.copytree(TOKENIZER, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = change(content["model"]["vocab"])
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def reversed_ids(vocab):
    return dict(zip(vocab, reversed(vocab.values()), strict=True))


def test_a_tokenizer_of_the_same_size_with_other_tokens_is_refused(tmp_path):
    """The model's embeddings would be used for other tokens."""
    base = with_vocab(tmp_path / "base", dict)
    other = with_vocab(tmp_path / "other", reversed_ids)
    with pytest.raises(UserError, match=rf"^data\.tokenizer: {other} .* allow_other_tokenizer: true$"):
        check_tokens(base, DataConfig(tokenizer=other))


@pytest.mark.parametrize("given", ["same", "more", "passthrough", "no tokenizer there"])
def test_a_tokenizer_with_the_same_ids_is_accepted(tmp_path, given):
    base = with_vocab(tmp_path / "base", dict)
    more = with_vocab(tmp_path / "more", lambda vocab: vocab | {"<|user|>": max(vocab.values()) + 50})
    if given == "no tokenizer there":
        (tmp_path / "empty").mkdir()
        check_tokens(str(tmp_path / "empty"), DataConfig(tokenizer=more))
    elif given == "passthrough":
        check_tokens(base, DataConfig(tokenizer="passthrough", vocab_size=100))
    else:
        check_tokens(base, DataConfig(tokenizer={"same": base, "more": more}[given]))


def test_another_tokenizer_is_refused_before_any_text_is_tokenized_unless_allowed(tmp_path, settings, write_config):
    other = with_vocab(tmp_path / "other", reversed_ids)
    base = with_vocab(tmp_path / "base", dict)
    (tmp_path / "base" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 400}))
    settings["data"]["tokenizer"] = other
    settings["model"] = {"type": "llama", "seq_len": 32}
    path = write_config(settings | {"initialize_from_hf": base, "use_hf_model_config": True})

    def preprocess(*flags):
        command = [sys.executable, "-m", "lmtrain", "preprocess", path, *flags]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    refused = preprocess()
    assert refused.returncode == 2
    assert "allow_other_tokenizer" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "cache").exists()
    done = preprocess("--allow_other_tokenizer", "true")
    assert done.returncode == 0, done.stderr


def test_a_run_has_the_sizes_of_its_checkpoint_unless_it_starts_from_another_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def configure(base, **model):
        settings = {"use_hf_model_config": True, "initialize_from_hf": base, "data": {"tokenizer": "byte"}}
        return RunConfig.model_validate(settings | {"model": {"seq_len": 32, **model}})

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 64}))
    checkpoint = tmp_path / "checkpoints" / "one" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    written = Loaded(configure("base"), Layer(), "one.yaml")
    for started_from, expected in (("base", 96), ("other", 64)):
        sizes = {"type": "llama", "hidden_dim": 96, "intermediate_dim": 48, "num_heads": 4, "num_layers": 1}
        saved = configure(started_from, **sizes).model_dump(mode="json")
        (checkpoint / "run.json").write_text(json.dumps({"config": saved}))
        assert resolve_hf(Run(written, "one"), check_tokenizer=False).config.model.hidden_dim == expected


@pytest.mark.long
@pytest.mark.end_to_end
def test_a_resumed_run_does_not_need_its_base_model(tmp_path, settings, write_config):
    def lmtrain(*arguments, code=0):
        done = run_in_process(arguments, tmp_path)
        assert done.returncode == code, done.stderr
        return done

    settings["trainer"] |= {"num_train_steps": 1, "steps_per_eval": 100}
    settings["optimizer"]["warmup"] = 0
    settings["data"]["validation_urls"] = None
    settings["model"] |= {"num_layers": 1, "use_bias": False}
    config = str(write_config(settings))
    lmtrain("train", config, "--trainer.id", "first", "--hf_save_path", "exports")
    shutil.move(tmp_path / "exports" / "first" / "step-1", tmp_path / "base")
    # it also works without biases: the format has them, and they are zero
    begin = ["--initialize_from_hf", "base", "--data.tokenizer", str(TOKENIZER), "--trainer.id", "second"]
    lmtrain("train", config, *begin)
    own = ["--initialize_from_hf", "base", "--use_hf_model_config", "true", "--trainer.id", "third"]
    settings["model"] = {"seq_len": 32}
    bare = str(write_config(settings, "bare.yaml"))
    lmtrain("train", bare, *own)
    shutil.rmtree(tmp_path / "base")
    assert "nothing to do" in lmtrain("train", config, *begin).stderr
    assert "2/2" in lmtrain("train", bare, *own, "--trainer.num_train_steps", "2").stderr
    assert "base" in lmtrain("train", config, *begin, "--trainer.id", "fourth", code=2).stderr
