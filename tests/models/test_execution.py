"""Execution and packing never change results: scan, recomputation, attention in blocks; packed documents."""

from typing import Any

import jax
import numpy as np
import pytest
from parity.variants import LENGTH, Variant, make, tokens

from lmtrain.models.interface import Documents, LanguageModel

# lengths of the documents of each row
ROWS = ((10, 14), (8, 9, 7))
SEGMENTS = np.stack([np.repeat(np.arange(len(row)), row) for row in ROWS]).astype(np.int32)
POSITIONS = np.stack([np.concatenate([np.arange(length) for length in row]) for row in ROWS]).astype(np.int32)
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
        # each way for at least two families
        *(
            pytest.param(name, ways, marks=pytest.mark.long)
            for name, ways in {
                "olmo2": WAYS[:3],
                "mpt": WAYS[2:],
                "deepseek_v3": WAYS[1:3],
                "backpack": WAYS[::2],
                "gpt2": WAYS[1::2],
            }.items()
        ),
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


LONG = [
    pytest.param(name, marks=pytest.mark.long)
    for name in ("gpt2", "mpt", "backpack", "mistral", "gemma", "olmo2", "llama-yarn", "gpt2-upcast", "deepseek_v3")
]


def together(model: LanguageModel, params, segments=SEGMENTS):
    return model.apply({"params": params}, tokens(), True, Documents(segments, POSITIONS), method="hidden")


def one_by_one(model: LanguageModel, params):
    rows = []
    for row, lengths in zip(tokens(), ROWS, strict=True):
        parts = np.split(row, np.cumsum(lengths)[:-1])
        hidden = [model.apply({"params": params}, part[None], True, method="hidden")[0] for part in parts]
        rows.append(jax.numpy.concatenate(hidden))
    return jax.numpy.stack(rows)


def run(small: Variant, hidden, **changes):
    """Hidden states, and gradients of all parameters."""
    model = small.model.clone(**changes)

    def weighed(params):
        found = hidden(model, params)
        return (found * WEIGHTS).sum(), found

    (_, found), gradients = jax.jit(jax.value_and_grad(weighed, has_aux=True))(small.params)
    return found, gradients


@pytest.mark.parametrize(
    "variant",
    ["llama-grouped", *LONG],
)
def test_packed_documents_and_their_gradients_equal_separate_ones(variant):
    small = make(variant)
    expected = run(small, one_by_one)
    for attention in ("xla", "blockwise"):
        found = run(small, together, attention=attention)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max(), err_msg=attention)


@pytest.mark.parametrize("variant", ["gpt2", pytest.param("backpack", marks=pytest.mark.long)])
def test_learned_positions_that_continue_change_the_result(variant):
    """The test above would pass if positions were not used."""
    small = make(variant)
    hidden = lambda params: small.model.apply({"params": params}, tokens(), True, Documents(SEGMENTS), method="hidden")  # noqa: E731
    found, expected = jax.jit(hidden)(small.params), jax.jit(lambda p: one_by_one(small.model, p))(small.params)
    assert np.abs(np.asarray(found - expected))[SEGMENTS > 0].max() > 0.01
    np.testing.assert_allclose(found[SEGMENTS == 0], expected[SEGMENTS == 0], rtol=1e-4, atol=1e-4)
