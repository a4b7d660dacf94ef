"""Execution never changes results: scanned or unrolled layers, with or without recomputation."""

from typing import Any

import jax
import numpy as np
import pytest
from parity.variants import LENGTH, Variant, make, tokens

from lmtrain.models.interface import Documents

SEGMENTS = np.repeat([[0, 1, 2], [3, 4, 4]], [10, 8, 6], axis=1)
WEIGHTS = np.random.default_rng(2).normal(size=(2, LENGTH, 16)).astype(np.float32)


def hidden_of(small: Variant, attention: str = "xla", **changes: Any):
    """Hidden states as a function of parameters, in training."""
    model = small.model.clone(attention=attention, config=small.config.model_copy(update=changes))
    rngs = {"dropout": jax.random.key(5)}
    return lambda params: model.apply(
        {"params": params}, tokens(), False, Documents(SEGMENTS), method="hidden", rngs=rngs
    )


WAYS = [(False, "full"), (True, "dots"), (False, "dots_no_batch"), (True, "save_attention"), (True, "offload")]


@pytest.mark.parametrize(
    ("variant", "ways"),
    [
        ("gpt2", [(False, "full"), (True, "offload")]),
        *(pytest.param(name, WAYS, marks=pytest.mark.long) for name in ("gpt2", "olmo2", "mpt", "backpack")),
    ],
)
def test_recomputation_and_unrolling_change_neither_loss_nor_gradients(variant, ways):
    small = make(variant, **({"attn_pdrop": 0.4} if variant == "gpt2" else {}))

    def run(scan, policy):
        hidden = hidden_of(small, scan_layers=scan, gradient_checkpointing=policy)
        return jax.jit(jax.value_and_grad(lambda params: (hidden(params) * WEIGHTS).sum()))(small.params)

    expected = run(True, False)
    for way in ways:
        for one, other in zip(jax.tree.leaves(run(*way)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max(), err_msg=str(way))


@pytest.mark.parametrize("variant", ["gpt2-upcast", "mistral", "mpt-softmax_scale", "backpack"])
def test_attention_in_blocks_gives_the_same_hidden_states(variant):
    small = make(variant, flash_attention_block_size=16)
    found, expected = (jax.jit(hidden_of(small, name))(small.params) for name in ("blockwise", "xla"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
