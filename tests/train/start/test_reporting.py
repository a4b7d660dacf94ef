"""FLOPs per token of a run, the peak of its devices, and the description of a run."""

import json
import re

import jax
import pytest

from lmtrain.data.caches import Caches
from lmtrain.plan.figures import describe
from lmtrain.plan.report import model_lines
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import run_identity
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.train.program.compile import ModelFlops
from lmtrain.train.program.program import build_program
from lmtrain.train.start import reporting as module
from lmtrain.train.start.reporting import describe_run, log_program, model_flops
from lmtrain.weights.export_folder import BaseIdentity
from lmtrain.weights.lora_base import LoadedModel


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


def test_linear_layers_have_a_line():
    model = {"type": "llama", "hidden_dim": 32, "num_heads": 2, "num_layers": 2, "seq_len": 64, "linear_attention": {}}
    config = RunConfig(model=model | {"layer_pattern": ["linear", "full"]}, trainer={"train_batch_size": 4})
    lines = list(model_lines(describe(build_program(config, 100), None), "here", ""))
    assert [line.split()[1] for line in lines if line.startswith("linear ")] == ["chunks"]


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


MODEL = {"type": "llama", "hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_layers": 2, "seq_len": 8}
CACHES = Caches({}, {})


def llama_program(**settings):
    trainer = {"train_batch_size": 4, "per_device_parallelism": 2, "mp": "p=f32,c=bf16"}
    return build_program(RunConfig.model_validate({"model": MODEL, "trainer": trainer} | settings), 64)


OF_BASE = {"initialize_from_hf": "https://a:b@host/x", "fingerprint": "f"}


@pytest.mark.parametrize("frozen", [{}, {"base": LoadedModel(None, BaseIdentity("f", "float32"), OF_BASE)}])
def test_the_run_info_is_plain_data_with_the_identity_and_the_base_without_secrets(frozen):
    planned = llama_program()
    info = describe_run(planned.config, "one", {"fingerprint": "x"}, CACHES, planned, frozen)
    assert json.loads(json.dumps(info)) == info
    assert info["run_id"] == "one"
    assert info["git"] is None or set(info["git"]) == {"commit", "branch", "changed", "remote"}
    assert info["identity"] == run_identity(planned.config, {"fingerprint": "x"}, CACHES.identity)
    assert info["config"] == resolved(planned.config)
    assert info["machine"]["microbatches"] == {"4": 2}
    assert info["machine"]["mesh"] == {"replica": 1, "data": 1, "model": 1}
    assert set(info["versions"]) > {"lmtrain", "jax"}
    expected = {"initialize_from_hf": "https://***@host/x", "fingerprint": "f"}
    assert info.get("base") == (expected if frozen else None)


@pytest.mark.parametrize(("mp", "warned"), [("bf16", True), ("p=bf16,c=f32", True), ("p=f32,c=bf16", False)])
def test_parameters_in_bfloat16_are_warned_of(caplog, mp, warned):
    log_program(llama_program(trainer={"train_batch_size": 4, "mp": mp}))
    assert any(line.startswith("trainer.mp: ") for line in caplog.messages) == warned


def test_the_log_has_the_parameters_and_those_that_lora_trains(caplog):
    lora = {"r": 2, "base_dtype": "float32", "target_modules": ["q_proj"]}
    with caplog.at_level("INFO"):
        log_program(llama_program())
        assert not any("LoRA" in line for line in caplog.messages)
        log_program(llama_program(initialize_from_hf="x", lora=lora))
    assert any(f"of which LoRA trains {2 * 2 * 2 * 16}, " in line for line in caplog.messages)
    assert any("| base/blocks/attn/q/kernel " in line for line in caplog.messages)
    assert caplog.messages[-1].startswith("  training state: ")
