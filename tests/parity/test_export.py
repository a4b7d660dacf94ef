"""A trained checkpoint, exported by the command line, is the same model in transformers."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from conftest import tiny_settings
from transformers import AutoModelForCausalLM

from lmtrain.checkpoint.discovery import find_checkpoint
from lmtrain.config.load import load_config
from lmtrain.models.registry import build_model
from lmtrain.run_config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.restore import restore_params

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with tiny.yaml, trained for 8 steps, and its export."""
    folder = tmp_path_factory.mktemp("trained")
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 8, "id": "exported"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    run(folder, "train", "tiny.yaml")
    run(folder, "export-hf", "tiny.yaml", "--output", "model")
    return folder


def run(folder, *arguments: str) -> str:
    command = [sys.executable, "-m", "lmtrain", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def our_logits(folder, ids: np.ndarray) -> np.ndarray:
    """What lmtrain computes from the checkpoint itself."""
    config = load_config(RunConfig, str(folder / "tiny.yaml")).config
    model = build_model(config.model, 384)
    params = restore_params(find_checkpoint(str(folder / "checkpoints")), model, plan_layout(PartitioningConfig()))
    return np.asarray(model.apply({"params": params}, ids))


def test_transformers_computes_the_same_logits(trained):
    model, loading = AutoModelForCausalLM.from_pretrained(
        trained / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    ids = np.random.default_rng(0).integers(0, 384, (2, 32))
    with torch.no_grad():
        theirs = model.eval()(torch.from_numpy(ids)).logits.numpy()
    ours = our_logits(trained, ids)
    assert np.abs(ours).max() > 1  # trained far enough for the comparison to mean something
    assert np.abs(ours - theirs).max() < 1e-4


def test_bfloat16_export_loads_in_bfloat16(trained):
    run(trained, "export-hf", "tiny.yaml", "--output", "half", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(trained / "half")
    assert model.dtype == torch.bfloat16
