"""Trained models for commands: which checkpoint, and which settings of a config a Hugging Face model keeps."""

import json
import shutil

import numpy as np
import pytest
from conftest import TOKENIZER

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.config.load import LoadedConfig
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import Run, identity, run_id
from lmtrain.runtime.errors import UserError
from lmtrain.weights.trained_model import from_checkpoint, from_hf

MODEL = {"type": "llama", "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 1, "num_heads": 4}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(seed, saved=step)`: a run of one.yaml with this seed, and with a checkpoint after `step` updates."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(str(TOKENIZER))

    def make(seed=0, saved=None, **model):
        config = RunConfig.model_validate(
            {"model": MODEL | model, "data": {"tokenizer": str(TOKENIZER)}, "trainer": {"seed": seed}}
        )
        loaded = LoadedConfig(config, path="one.yaml")
        made = Run(loaded, run_id(config, "one"))
        if saved is not None:
            checkpointer = Checkpointer(made.checkpoints, CheckpointerConfig())
            about = identity(config) | {"tokenizer": tokenizer.identity, "data_tokens": "x"}
            run_info = {"run_id": made.id, "identity": about, "config": resolved(config)}
            checkpointer.save(saved, Kind.PERMANENT, {"params": {"a": np.ones(1)}}, run_info)
            checkpointer.close()
        return made

    return make


def test_the_newest_checkpoint_of_the_run_is_used_and_newer_runs_are_named(run, caplog):
    mine = run(saved=3)
    model = from_checkpoint(mine, None)
    assert (model.step, model.source.rpartition("/")[2], model.origin.run) == (3, "step-3", mine.id)
    assert "newer runs" not in caplog.text
    other = run(seed=1, saved=2)
    assert from_checkpoint(mine, None).step == 3
    assert f"{other.id} (step 2)" in caplog.text
    assert from_checkpoint(mine, other.checkpoints).step == 2
    with pytest.raises(UserError, match=rf"{other.id} \(step 2\).*--run"):
        from_checkpoint(run(seed=2), None)


def test_a_checkpoint_of_another_model_is_refused(run):
    path = run(saved=3).checkpoints
    with pytest.raises(UserError, match=r"model\.hidden_dim: "):
        from_checkpoint(run(hidden_dim=64), path)


@pytest.fixture
def base(tmp_path):
    """A folder with a model's config and its tokenizer."""
    folder = shutil.copytree(TOKENIZER, tmp_path / "base")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def test_a_hugging_face_model_has_its_own_sizes_and_the_execution_of_the_config(base):
    config = RunConfig.model_validate(
        {"model": MODEL | {"scan_layers": False}, "initialize_from_hf": "x", "lora": {}, "trainer": {"seed": 5}}
    )
    model = from_hf(base, config)
    assert (model.config.model.hidden_dim, model.config.model.scan_layers) == (64, False)
    assert (model.config.lora, model.config.trainer.seed, model.config.data.tokenizer) == (None, 5, base)
    assert (model.source, model.step, model.origin) == (base, None, None)
    assert from_hf(base).config.model.hidden_dim == 64


def test_a_tokenizer_with_other_tokens_or_none_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"data\.tokenizer: byte .*base"):
        from_hf(base, RunConfig.model_validate({"model": MODEL, "data": {"tokenizer": "byte"}}))
    (tmp_path / "base" / "tokenizer.json").unlink()
    (tmp_path / "base" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"--hf .*base: no tokenizer"):
        from_hf(base)
