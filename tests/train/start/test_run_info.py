"""The description of a run in its log and in its checkpoints."""

import json

import pytest

from lmtrain.data.caches import Caches
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import run_identity
from lmtrain.train.program.program import build_program
from lmtrain.train.start.reporting import describe_run, log_program
from lmtrain.weights.export_folder import BaseIdentity
from lmtrain.weights.load_checkpoint import LoraBase

MODEL = {"type": "llama", "hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_layers": 2, "seq_len": 8}
CACHES = Caches({}, {})


def program(**settings):
    trainer = {"train_batch_size": 4, "per_device_parallelism": 2, "mp": "p=f32,c=bf16"}
    return build_program(RunConfig.model_validate({"model": MODEL, "trainer": trainer} | settings), 64)


OF_BASE = {"initialize_from_hf": "https://a:b@host/x", "fingerprint": "f"}


@pytest.mark.parametrize("base", [None, LoraBase(None, BaseIdentity("f", "float32"), OF_BASE)])
def test_the_run_info_is_plain_data_with_the_identity_and_the_base_without_secrets(base):
    planned = program()
    info = describe_run(planned.config, "one", {"fingerprint": "x"}, CACHES, planned, base)
    assert json.loads(json.dumps(info)) == info
    assert info["run_id"] == "one"
    assert info["git"] is None or set(info["git"]) == {"commit", "branch", "changed", "remote"}
    assert info["identity"] == run_identity(planned.config, {"fingerprint": "x"}, CACHES.identity)
    assert info["config"] == resolved(planned.config)
    assert info["machine"]["microbatches"] == {"4": 2}
    assert info["machine"]["mesh"] == {"replica": 1, "data": 1, "model": 1}
    assert set(info["versions"]) > {"lmtrain", "jax"}
    expected = {"initialize_from_hf": "https://***@host/x", "fingerprint": "f"}
    assert info.get("base") == (None if base is None else expected)


@pytest.mark.parametrize(("mp", "warned"), [("bf16", True), ("p=bf16,c=f32", True), ("p=f32,c=bf16", False)])
def test_parameters_in_bfloat16_are_warned_of(caplog, mp, warned):
    log_program(program(trainer={"train_batch_size": 4, "mp": mp}))
    assert any(line.startswith("trainer.mp: ") for line in caplog.messages) == warned


def test_the_log_has_the_parameters_and_those_that_lora_trains(caplog):
    lora = {"r": 2, "base_dtype": "float32", "target_modules": ["q_proj"]}
    with caplog.at_level("INFO"):
        log_program(program())
        assert not any("LoRA" in line for line in caplog.messages)
        log_program(program(initialize_from_hf="x", lora=lora))
    assert any(f"of which LoRA trains {2 * 2 * 2 * 16}, " in line for line in caplog.messages)
    assert any("| base/blocks/attn/q/kernel " in line for line in caplog.messages)
    assert caplog.messages[-1].startswith("  training state: ")
