"""Gradients of a bfloat16 step are as exact as PyTorch's under autocast, on one device and on meshes; those with
products in 8 bits are within their rounding."""

from pathlib import Path

import pytest
from conftest import TOKENIZER, TRAIN_FILES
from forked import run_script

BENCHMARK = Path(__file__).parent.parent.parent / "tools" / "bench" / "gradients.py"


@pytest.mark.long
# Backpack needs the benchmark's 32,768 tokens
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.release) for name in ("gpt2", "mpt"))]
)
def test_no_tensor_is_off_by_more_than_a_percent_or_than_autocast(tmp_path, family):
    arguments = [family, "--tokens", 8192, "--all", "--products", "fp8", "int8"]
    arguments += ["--text", TRAIN_FILES[0], "--tokenizer", TOKENIZER]
    assert run_script(BENCHMARK.read_text(), *arguments, folder=tmp_path).count("%") > 60
