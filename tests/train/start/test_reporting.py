"""FLOPs per token of a run, and the peak of its devices."""

import re

import jax
import pytest

from lmtrain.plan.figures import describe
from lmtrain.plan.report import model_lines
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.train.program.compile import ModelFlops
from lmtrain.train.program.program import build_program
from lmtrain.train.start import reporting as module
from lmtrain.train.start.reporting import model_flops


@pytest.fixture(scope="module")
def program():
    model = {"type": "gpt2", "hidden_dim": 32, "num_heads": 2, "num_layers": 3, "seq_len": 64}
    return build_program(RunConfig(model=model, trainer={"train_batch_size": 4}), 100)


def test_flops_per_token_are_those_of_lmtrain_plan(program):
    work = model_flops(program)
    text = "\n".join(model_lines(describe(program, None), "here", ""))
    full, causal = re.search(r"(\S+) per token, .*; (\S+) with causal attention", text).groups()
    assert (work.flops_per_token, work.causal_flops_per_token) == pytest.approx((float(full), float(causal)), rel=1e-3)
    (per_step,) = re.search(r"FLOPs +(\S+) per step", text).groups()
    assert work.flops_per_token * 4 * 64 == pytest.approx(float(per_step), rel=1e-2)


def test_flops_per_token_are_those_of_the_matrix_products_forward_and_twice_backward(program):
    """Computed by hand: qkv, out, up and down of each layer, the two attention products, and the head."""
    work = model_flops(program)
    width, length = 32, 64
    weights = 3 * (3 * width**2 + width**2 + 2 * 4 * width**2) + 100 * width
    full, causal = (6 * (weights + 3 * 2 * keys * width) for keys in (length, (length + 1) / 2))
    assert work.flops_per_token == pytest.approx(full)
    assert work.causal_flops_per_token == pytest.approx(causal)


def test_the_peak_is_that_of_all_devices_and_the_convention_is_logged(program, monkeypatch, caplog):
    h100 = find_accelerator("h100")
    monkeypatch.setattr(module, "find_accelerator", lambda kind: h100)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with caplog.at_level("INFO"):
        work = model_flops(program)
    assert work.peak_flops == 8 * 989e12
    message = caplog.records[-1].message
    for part in ("MFU", "989 TFLOP/s", "NVIDIA H100", "16-bit", "per device", "mfu counts full", "mfu_causal half"):
        assert part in message


def test_an_unknown_device_logs_that_there_is_no_mfu(program, caplog):
    with caplog.at_level("INFO"):
        work = model_flops(program)  # tests run on CPUs
    assert work.peak_flops is None
    assert "unknown peak FLOP/s" in caplog.records[-1].message
    assert "MFU" in caplog.records[-1].message


def test_a_device_at_its_peak_has_an_mfu_of_100_percent():
    work = ModelFlops(1e12, 0.75e12, find_accelerator("NVIDIA H100 80GB HBM3").peak_flops)
    rates = work.rates(989.0)
    assert rates == pytest.approx(
        {"throughput/gflops_per_second": 989e3, "throughput/mfu": 100.0, "throughput/mfu_causal": 75.0}
    )
