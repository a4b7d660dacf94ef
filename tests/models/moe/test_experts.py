"""Experts on one device are the sum over all experts; on several devices: tests/models/test_families.py."""

import jax
import jax.numpy as jnp
import numpy as np
from models import quick

from lmtrain.models.moe import experts
from lmtrain.models.moe.config import MoeConfig
from lmtrain.models.moe.experts import Gate, Matrices, apply_experts, part_of, rows_of_round, sort_by_expert
from lmtrain.models.moe.layer import Moe

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


def test_experts_with_biases_and_limited_gates_are_those_of_transformers():
    """Values and all gradients; a third of the gates are at the limit."""
    import torch
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    settings = MoeConfig(num_experts=EXPERTS, experts_per_token=2, router="topk_softmax", biases=True, gate_limit=0.8)
    layer = Moe(settings, EMBED, WIDTH, "silu", jax.nn.initializers.normal(1.0))
    params = quick.random_like(jax.eval_shape(lambda: layer.init(jax.random.key(0), X, None, True)), 0.5)

    def loss(params, x):
        y = layer.apply({"params": params}, x, None, True)
        return (y * C).sum(), y

    (d_params, d_x), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, X)

    theirs = GptOssConfig(hidden_size=EMBED, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2,
                          swiglu_limit=0.8, experts_implementation="eager")  # fmt: skip
    mlp, own = GptOssMLP(theirs), params["experts"]

    def joined(gate, up):
        return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)

    values = {
        "router.weight": params["router"]["kernel"].T,
        "router.bias": params["router"]["bias"],
        "experts.gate_up_proj": joined(own["gate"]["kernel"], own["up"]["kernel"]),
        "experts.gate_up_proj_bias": joined(own["gate"]["bias"], own["up"]["bias"]),
        "experts.down_proj": own["down"]["kernel"],
        "experts.down_proj_bias": own["down"]["bias"],
    }
    mlp.load_state_dict({name: torch.tensor(np.array(value)) for name, value in values.items()})
    x = torch.tensor(np.array(X), requires_grad=True)
    out, _ = mlp(x)
    (out * torch.tensor(np.array(C))).sum().backward()
    found = d_params["experts"]
    gradients = {
        "router.weight": d_params["router"]["kernel"].T,
        "router.bias": d_params["router"]["bias"],
        "experts.gate_up_proj": joined(found["gate"]["kernel"], found["up"]["kernel"]),
        "experts.gate_up_proj_bias": joined(found["gate"]["bias"], found["up"]["bias"]),
        "experts.down_proj": found["down"]["kernel"],
        "experts.down_proj_bias": found["down"]["bias"],
    }
    out = out.detach()
    np.testing.assert_allclose(y, out, atol=1e-5 * float(out.abs().max()))
    np.testing.assert_allclose(d_x, x.grad, atol=1e-5 * float(x.grad.abs().max()))
    for name, parameter in mlp.named_parameters():
        expected = parameter.grad.numpy()
        np.testing.assert_allclose(gradients[name], expected, atol=2e-5 * np.abs(expected).max(), err_msg=name)
