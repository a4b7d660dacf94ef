"""Experts on one device are the sum over all experts; on several devices: tests/models/test_families.py."""

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.models.moe import experts
from lmtrain.models.moe.experts import Gate, Matrices, apply_experts, part_of, rows_of_round, sort_by_expert

BATCH, LENGTH, EMBED, WIDTH, EXPERTS, SELECTED = 3, 50, 12, 16, 6, 2
RNG = np.random.default_rng(0)


def random(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, C = random(BATCH, LENGTH, EMBED), random(BATCH, LENGTH, EMBED)
MATRICES = Matrices(random(EXPERTS, EMBED, WIDTH), random(EXPERTS, EMBED, WIDTH), random(EXPERTS, WIDTH, EMBED))
WEIGHTS = jnp.asarray(RNG.random((BATCH, LENGTH, SELECTED)), jnp.float32)
# expert 0 has most of the tokens, expert 5 none
CHOSEN = jnp.asarray(np.where(RNG.random((BATCH, LENGTH)) < 0.8, 0, 4)[..., None] + np.array([0, 1])) % 5


def over_all_experts(x, weights, matrices):
    total = jnp.zeros_like(x)
    for expert, (gate, up, down) in enumerate(zip(*matrices, strict=True)):
        weight = jnp.where(expert == CHOSEN, weights, 0).sum(-1, keepdims=True)
        total += weight * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
    return total


def check(function):
    """Values and gradients of `function(x, weights, matrices)`."""

    def loss(function):
        return jax.jit(jax.value_and_grad(lambda *inputs: (function(*inputs) * C).sum(), (0, 1, 2)))

    found, expected = (loss(each)(X, WEIGHTS, MATRICES) for each in (function, over_all_experts))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_values_and_gradients_are_those_of_a_sum_over_all_experts():
    check(lambda x, weights, matrices: apply_experts(x, CHOSEN, weights, matrices, Gate("silu")))


def test_several_rounds_give_the_same(monkeypatch):
    """The first half of the experts has most of the rows, as of a device that others would wait for."""
    monkeypatch.setattr(experts, "_MULTIPLE", 16)
    tokens = BATCH * LENGTH
    assert rows_of_round(tokens * SELECTED, 4) < tokens

    def in_halves(x, weights, matrices):
        total = 0.0
        for first in (0, EXPERTS // 2):
            own = Matrices(*(matrix[first : first + EXPERTS // 2] for matrix in matrices))
            arrays = x.reshape(tokens, -1), CHOSEN.reshape(tokens, -1) - first, weights.reshape(tokens, -1)
            total += experts._of_tokens(*arrays, own, Matrices(None, None, None), Gate("silu"), 4).reshape(x.shape)
        return total

    check(in_halves)


def test_rows_are_sorted_by_expert_in_the_order_of_tokens():
    rows = sort_by_expert(jnp.array([[2, 0], [0, 7], [2, -1]]), 3)
    assert rows.sizes.tolist() == [2, 0, 2]
    assert rows.selections.tolist() == [1, 2, 0, 4, 3, 5]
    assert rows.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert rows.row_of.tolist() == [[2, 0], [1, 4], [3, 5]]
    part = part_of(rows, jnp.int32(1), 2)
    assert part.sizes.tolist() == [1, 0, 1]
    assert part.selections.tolist() == [2, 0]
    assert part.row_of.tolist() == [[1, -1], [0, -1], [2, -1]]
