"""A complete run between two models on the Hub: starts from one and uploads to the other."""

import os

import numpy as np
import pytest
import yaml
from conftest import TOKENIZER, tiny_settings
from parity.variants import LLAMA, SIZES

from lmtrain.run.config import RunConfig

pytestmark = pytest.mark.end_to_end

# Overrides that replace the model on the Hub.
OWN = ["--model", "{type: gpt2, hidden_dim: 32, num_heads: 2}", "--initialize_from_hf", "false"]
OWN += ["--use_hf_model_config", "false", "--data.tokenizer", str(TOKENIZER)]


@pytest.fixture
def base(hub):
    """Files of a gated model on the Hub with a tokenizer."""
    from lmtrain.hf.tokenizer import load_tokenizer
    from lmtrain.models.registry import build_model
    from lmtrain.weights.write_export import build_export, write_export

    config = RunConfig.model_validate({"model": {"type": "llama", **SIZES, **LLAMA, "seq_len": 32}}).model
    plan = build_export(config, build_model(config, 384), load_tokenizer(str(TOKENIZER)), "float32")
    rng = np.random.default_rng(0)
    write_export(str(hub.home / "made"), plan, (rng.normal(size=p.shape).astype(np.float32) * 0.3 for p in plan.pieces))
    files = {name: (hub.home / "made" / name).read_bytes() for name in os.listdir(hub.home / "made")}
    hub.add("acme/base", files, admits=("somebody",))
    return files


@pytest.fixture
def config(hub):
    settings = tiny_settings()
    settings["model"] = {"type": "llama", "seq_len": 32}
    settings |= {"initialize_from_hf": "acme/base@main", "use_hf_model_config": True}
    settings |= {"hf_upload": "lab/new@runs", "hf_save_steps": 2}
    settings["trainer"] |= {"num_train_steps": 3, "id": "uploaded"}
    (hub.home / "tiny.yaml").write_text(yaml.safe_dump(settings))


def lmtrain(hub, *arguments: str, **environment: str):
    code = f"import sys; from lmtrain.cli import main; sys.argv = {['lmtrain', *arguments]!r}; main()"
    return hub.run(code, **environment)


@pytest.mark.long
def test_training_starts_from_a_gated_model_and_uploads_its_exports(hub, base, config):
    done = lmtrain(hub, "train", "tiny.yaml", HF_TOKEN=hub.token)
    assert done.returncode == 0, done.stderr
    assert "the weights of acme/base@main" in done.stderr
    new = hub.repositories["lab/new"]
    assert new.messages("runs") == ["uploaded, step 3", "uploaded, step 2", "first"]
    last = new.files("runs")
    assert last.keys() >= base.keys()
    assert last["model.safetensors"] != base["model.safetensors"]
    assert not (hub.home / "exports").exists()

    by_hand = ["export-hf", "tiny.yaml", "--upload", "lab/by-hand", "--output", "kept"]
    done = lmtrain(hub, *by_hand, HF_TOKEN=hub.token)
    assert done.returncode == 0, done.stderr
    assert hub.repositories["lab/by-hand"].files()["model.safetensors"] == last["model.safetensors"]
    assert (hub.home / "kept" / "model.safetensors").read_bytes() == last["model.safetensors"]
    assert hub.leaks(hub.token) == []


@pytest.mark.parametrize(
    ("flags", "has_token", "message"),
    [
        ([], False, "acme/base@main: config.json cannot be read from the hub: gated repository"),
        pytest.param(OWN, False, "upload requires a token", marks=pytest.mark.long),
        pytest.param(["--hf_upload", "elsewhere/x"], True, "elsewhere/x: an upload would fail", marks=pytest.mark.long),
    ],
)
def test_refusals_of_the_hub_are_reported_before_any_computation(hub, base, config, flags, has_token, message):
    done = lmtrain(hub, "train", "tiny.yaml", *flags, **({"HF_TOKEN": hub.token} if has_token else {}))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (hub.home / "checkpoints").exists()
