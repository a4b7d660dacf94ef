"""Models saved by transformers give the logits that it computed from them, without torch.

The folders are written by tools/parity_fixtures.py.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from parity.variants import VARIANTS, VOCAB

from lmtrain.models.registry import build_model
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.hf_config import config_of
from lmtrain.weights.load_hf import load_hf_params

FIXTURES = Path(__file__).parent / "fixtures"
TOOL = Path(__file__).parents[2] / "tools" / "parity_fixtures.py"
OLD = ["old-backpack", "old-gpt2", "old-gpt2-bin", "old-llama", "old-llama3-sharded", "old-mpt"]  # .bin: with torch


def check(name: str) -> None:
    """Import a fixture as a user would, and compare."""
    folder = str(FIXTURES / name)
    config = config_of(folder).model.model_copy(update={"gradient_checkpointing": False})  # compiles sooner
    model = build_model(config, VOCAB)
    params = load_hf_params(folder, config, model, build_layout(PartitioningConfig()), "float32")
    expected = np.load(FIXTURES / name / "expected.npz")
    found = apply(model, params, expected["ids"])
    assert found.shape == expected["logits"].shape
    assert np.abs(expected["logits"]).max() > 0.5
    assert np.abs(found - expected["logits"]).max() < 1e-4


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, ids):
    return model.apply({"params": params}, ids)


# test_variants.py also compares with the installed version of transformers.
IN_SUITE = ("old-backpack", "old-gpt2-bin", "old-mpt")  # with the test below one of each family


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.long) for name in (*VARIANTS, *OLD)]
)
def test_logits_agree(name):
    check(name)


def test_there_is_a_fixture_for_every_variant_and_no_other():
    assert sorted(os.listdir(FIXTURES)) == sorted([*VARIANTS, *OLD])


def test_importing_and_computing_need_no_torch():
    code = "import sys; from parity.test_fixtures import check; check('old-llama3-sharded')"
    run("-c", f"{code}; assert not {{'torch', 'transformers'}} & sys.modules.keys()")


@pytest.mark.long
def test_the_tool_makes_the_same_files_again():
    assert run(str(TOOL), "--check", "backpack-n_inner", "old-gpt2-bin") == "up to date\n"


def run(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
