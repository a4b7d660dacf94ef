"""The program of a run with LoRA: what is stored, what is planned, how much is computed."""

import jax
import numpy as np
import pytest

from lmtrain.lora.model import BASE
from lmtrain.models.params import flatten, unflatten
from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import build_program

VOCAB = 64
MODEL = {"type": "llama", "hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4, "num_layers": 2, "seq_len": 16}


def plan(**settings):
    base = {"model": MODEL, "trainer": {"train_batch_size": 4, "mp": "p=f32,c=bfloat16"}, "initialize_from_hf": "x"}
    return build_program(RunConfig.model_validate(base | settings), VOCAB)


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_the_base_is_stored_in_its_own_dtype_and_has_no_moments():
    whole, adapted = plan(), plan(lora={"r": 2, "base_dtype": "bfloat16"})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adapted.abstract.frozen[BASE])} == {"bfloat16"}
    assert adapted.state_bytes["base"] == whole.state_bytes["params"] // 2
    assert adapted.state_bytes["optimizer"] == pytest.approx(2 * adapted.state_bytes["params"], abs=100)
    assert set(adapted.abstract.parts) == {"params", "optimizer"}
    assert "base" in adapted.memory_use.state
    advised = [
        any(line.startswith("lora.base_dtype: bfloat16") for line in program.memory_use.advice(None))
        for program in (adapted, plan(lora={"r": 2, "base_dtype": "float32"}))
    ]
    assert advised == [False, True]


def test_a_base_in_4_bits_takes_a_quarter_of_the_memory():
    whole, program = (
        plan(lora={"r": 2, "base_dtype": "bfloat16"} | more, model=MODEL | {"hidden_dim": 256, "intermediate_dim": 512})
        for more in ({}, {"base_quantization": "nf4"})
    )
    found = flatten(program.abstract.frozen[BASE])
    assert "blocks/mlp/up/kernel" not in found
    assert (found["blocks/mlp/up/kernel_nf4"].shape, found["blocks/mlp/up/kernel_nf4"].dtype) == (
        (2, 4, 32, 512),
        "uint8",
    )
    matrices = sum(leaf.size for path, leaf in flatten(whole.abstract.frozen[BASE]).items() if "kernel" in path)
    saved = whole.state_bytes["base"] - program.state_bytes["base"]
    assert saved / (2 * matrices) == pytest.approx(1 - 0.5159 / 2, abs=2e-3)


@pytest.mark.parametrize("products", ["", pytest.param(",q=fp8", marks=pytest.mark.long)])
def test_a_base_in_8_bits_takes_half_of_the_memory_and_only_its_adapters_are_trained(products):
    mp = f"p=f32,c=bfloat16{products}"
    trainer = {"train_batch_size": 4, "mp": mp}
    lora = {"r": 2, "base_dtype": "bfloat16"}
    whole, program = (
        plan(lora=lora | more, trainer=trainer, optimizer={"learning_rate": 0.1, "warmup": 0})
        for more in ({}, {"base_quantization": "fp8"})
    )
    kinds = {path: leaf.dtype.name for path, leaf in flatten(program.abstract.frozen[BASE]).items()}
    assert kinds["blocks/mlp/up/kernel"] == "float8_e4m3fn"
    assert kinds["tokens/embedding"] == "bfloat16"
    in_blocks = sum(
        leaf.size
        for path, leaf in flatten(whole.abstract.frozen[BASE]).items()
        if path.startswith("blocks/") and "kernel" in path
    )
    saved = whole.state_bytes["base"] - program.state_bytes["base"]
    assert saved == in_blocks - 4 * 2 * 7  # a float32 scale for each of 7 matrices of 2 layers
    base = whole.init().frozen[BASE]
    kept = {}
    for path, array in flatten(base).items():
        kept |= program.store(path, array)
    state = program.init({BASE: unflatten(kept)})
    assert base["blocks"]["mlp"]["up"]["kernel"].is_deleted()  # a device never holds two copies of all
    assert not base["tokens"]["embedding"].is_deleted()
    batch = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), program.example()[1])
    batch["tokens"] = np.random.default_rng(0).integers(0, VOCAB, batch["tokens"].shape, dtype=np.int32)
    before, frozen = jax.tree.map(np.asarray, (state.params, state.frozen[BASE]))
    for _ in range(2):  # the first step changes B only, as B is zero
        state, metrics, _ = program.train_step(state, batch)
    assert np.isfinite(metrics["train/loss"])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        assert np.abs(new - old).max() > 0
    for old, new in zip(jax.tree.leaves(frozen), jax.tree.leaves(state.frozen[BASE]), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_flops_are_those_without_gradients_of_weights():
    """Two passes over the weights, and three over attention."""
    whole, adapted = plan(), plan(lora={"r": 2})
    forward, causal = whole.forward_flops_per_token
    keys, seen = 16, 8.5  # a query of causal attention sees half of the keys on average
    scores = (forward - causal) / (keys - seen) * keys
    assert adapted.flops_per_token[0] == pytest.approx(2 * (forward - scores) + 3 * scores)
    assert whole.flops_per_token[0] == 3 * forward
