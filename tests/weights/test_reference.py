"""The reference of preference tuning: what names its stored values, and what a corrupt file costs."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import tiny_settings

from lmtrain.run.config import RunConfig
from lmtrain.weights.reference import key_of, read_values, write_values

VALUES = np.arange(-8, 0, dtype=np.float32)
MODEL = {"type": "llama", "seq_len": 48, "hidden_dim": 32, "num_heads": 4, "num_layers": 2, "intermediate_dim": 64}


def key(model=None, source=None, cache=None, **trainer):
    settings = tiny_settings()
    settings["model"] = MODEL | (model or {})
    settings["trainer"] |= trainer
    batches = {"seq_len": 48, "reset_positions": True, "mask_across_documents": True, "batch_size": 4}
    batches |= {"all_batches": 3, "store": SimpleNamespace(pack="first_fit")} | (source or {})
    read = type("Source", (SimpleNamespace,), {"__len__": lambda self: 3})(**batches)
    stored = SimpleNamespace(identity={"recipe": {"template": "a"}}, too_long="drop")
    return key_of("digest", RunConfig(**settings), SimpleNamespace(**vars(stored) | (cache or {})), read)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"rope": {"type": "linear", "factor": 2.0}}},
        {"model": {"rope": {"theta": 500_000.0}}},
        {"model": {"layer_norm_epsilon": 1e-6}},
        {"model": {"sliding_window": 16}},
        {"model": {"attention_logit_cap": 30.0}},
        {"model": {"final_logit_cap": 30.0}},
        {"model": {"scale_embeddings": True}},
        {"source": {"reset_positions": False}},
        {"source": {"mask_across_documents": False}},
        {"cache": {"identity": {"recipe": {"template": "b"}}}},
        {"cache": {"too_long": "truncate"}},
        {"mp": "p=f32,c=bf16"},
        {"mp": "p=f32,c=f32,q=int8"},
    ],
    ids=str,
)
def test_values_of_another_computation_have_another_name(changed):
    assert key(**changed) != key()


def test_values_of_some_of_the_sequences_are_those_of_a_packing():
    """Of all sequences, both have all pairs."""
    best = SimpleNamespace(pack="best_fit")
    assert key(source={"store": best}) == key()
    assert key(source={"all_batches": 5, "store": best}) != key(source={"all_batches": 5}) != key()


@pytest.mark.parametrize(
    "changed", [{"attn_backend": "xla"}, {"scan_layers": False}, {"gradient_checkpointing": False}]
)
def test_settings_of_execution_change_no_name(changed):
    assert key(model=changed) == key()


def flip(content):
    return content[:-40] + bytes(byte ^ 64 for byte in content[-40:-36]) + content[-36:]


@pytest.mark.parametrize("corrupt", [flip, lambda content: content[:-36], lambda content: content[:20], lambda _: b""])
def test_a_corrupt_file_is_logged_and_not_read(tmp_path, caplog, monkeypatch, corrupt):
    path = tmp_path / "reference.npy"
    write_values(str(path), VALUES)
    assert np.array_equal(read_values(str(path), 8), VALUES)
    assert caplog.messages == []
    path.write_bytes(corrupt(path.read_bytes()))
    assert read_values(str(path), 8) is None
    assert f"{path} is corrupt" in caplog.messages[-1]


def test_values_of_another_number_of_documents_are_not_read(tmp_path):
    write_values(str(tmp_path / "a.npy"), VALUES)
    assert read_values(str(tmp_path / "a.npy"), 9) is None
    assert read_values(str(tmp_path / "none.npy"), 8) is None
