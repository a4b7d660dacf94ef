"""Routers against numpy: selection, weights, losses and loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from lmtrain.models.moe.config import MoeConfig
from lmtrain.models.moe.layer import Router, score
from lmtrain.models.moe.load import LOAD, balanced, collect_load, load_metrics
from lmtrain.models.params import AUXILIARY, collect

BATCH, LENGTH, EMBED, EXPERTS, SELECTED = 3, 7, 5, 6, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LENGTH, EMBED)).astype(np.float32)
KERNEL = RNG.normal(size=(EMBED, EXPERTS)).astype(np.float32)
BIAS = np.array([0, 0.5, -0.2, 0.3, 0, -1], np.float32)
USED = np.arange(LENGTH) < np.array([[7], [3], [0]])


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def route(used=None, **settings):
    config = MoeConfig(num_experts=EXPERTS, experts_per_token=SELECTED, **settings)
    params = {"kernel": KERNEL} | ({} if config.bias_update_rate is None else {"balance_bias": BIAS})
    router = Router(config, EMBED, normal(0.1))
    return router.apply({"params": params}, X, used, mutable=[AUXILIARY, LOAD])


SCORES = X @ KERNEL
SIGMOIDS = 1 / (1 + np.exp(-SCORES))
KINDS = {
    "softmax_topk": ({}, softmax(SCORES), None),
    "unnormalized": ({"normalize": False}, softmax(SCORES), lambda chosen: chosen),
    "topk_softmax": ({"router": "topk_softmax"}, SCORES, softmax),
    "scaled": ({"router": "topk_softmax", "routed_scaling_factor": 2.5}, SCORES, lambda chosen: 2.5 * softmax(chosen)),
    "sigmoid": ({"router": "sigmoid"}, SIGMOIDS, None),
    "sigmoid with bias": ({"router": "sigmoid", "bias_update_rate": 0.1}, SIGMOIDS, None),
    "softmax with bias": ({"bias_update_rate": 0.1}, softmax(SCORES), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_selection_and_weights(kind):
    settings, values, weigh = KINDS[kind]
    (experts, weights), _ = route(**settings)
    ranked = values + (BIAS if "bias_update_rate" in settings else 0)
    expected = np.argsort(-ranked, axis=-1)[..., :SELECTED]
    assert np.array_equal(experts, expected)
    chosen = np.take_along_axis(values, expected, -1)  # without the bias
    np.testing.assert_allclose(weights, weigh(chosen) if weigh else chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)


def test_scores_of_16_bit_inputs_do_not_round_the_kernel():
    """Nor its gradient. The inputs, and numbers of the reference, are those of bfloat16."""
    x, kernel = RNG.normal(size=(2, 8, 64)), RNG.normal(size=(64, EXPERTS)).astype(np.float32)
    x, d_scores = (jnp.asarray(a, jnp.bfloat16) for a in (x, RNG.normal(size=(2, 8, EXPERTS))))
    exact_x, exact_d = (np.asarray(a, np.float64) for a in (x, d_scores))

    @jax.jit
    def both(x, kernel):
        scores, pull = jax.vjp(score, x, kernel)
        return scores, *pull(d_scores.astype(jnp.float32))

    scores, d_x, d_kernel = both(x, kernel)
    assert (scores.dtype, d_x.dtype, d_kernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(scores, exact_x @ kernel, atol=1e-3)  # with a rounded kernel 2e-2
    np.testing.assert_allclose(d_kernel, np.einsum("BSD,BSE->DE", exact_x, exact_d), atol=1e-4)
    np.testing.assert_allclose(d_x.astype(np.float32), exact_d @ kernel.T, atol=0.05)


def test_losses_are_means_over_sequences_and_tokens_without_padding():
    (experts, _), sown = route(USED, aux_loss=0.5, z_loss=0.25)
    found = collect(sown)
    probabilities = softmax(SCORES)
    balances, squares, entropies, load = [], [], [], np.zeros(EXPERTS)
    for row in range(2):  # the third has no token that is used
        used = USED[row]
        counts = np.bincount(np.asarray(experts[row])[used].ravel(), minlength=EXPERTS)
        shares = counts / (used.sum() * SELECTED)
        balances.append(EXPERTS * (shares * probabilities[row][used].mean(0)).sum())
        squares += list(np.log(np.exp(SCORES[row][used]).sum(-1)) ** 2)
        entropies += list(-(probabilities[row][used] * np.log(probabilities[row][used])).sum(-1))
        load += counts
    expected = {"balance_loss": balances, "z_loss": squares, "router_entropy": entropies}
    for name, values in expected.items():
        mean = float(found[f"moe/{name}"].total.sum() / found[f"moe/{name}"].weight.sum())
        assert mean == pytest.approx(np.mean(values), rel=1e-5), name
        assert float(found[f"moe/{name}"].weight.sum()) == len(values)
    assert [found[f"moe/{name}"].coefficient for name in expected] == [0.5, 0.25, 0.0]
    (of_router,) = collect_load(sown).values()
    assert of_router.tolist() == load.tolist()


def test_a_balanced_load_has_the_loss_one():
    config = MoeConfig(num_experts=4, experts_per_token=2, router="sigmoid")
    router = Router(config, 4, normal(0.1))
    x = jnp.asarray([np.roll([4.0, 4.0, -4.0, -4.0], turn) for turn in range(4)])[None]
    _, sown = router.apply({"params": {"kernel": jnp.eye(4)}}, x, None, mutable=[AUXILIARY, LOAD])
    assert float(collect(sown)["moe/balance_loss"].total[0]) == pytest.approx(1)


def test_evaluation_computes_no_losses():
    config = MoeConfig(num_experts=EXPERTS, experts_per_token=SELECTED)
    router = Router(config, EMBED, normal(0.1))

    def text(mutable):
        return str(jax.make_jaxpr(lambda x: router.apply({"params": {"kernel": KERNEL}}, x, None, mutable=mutable))(X))

    assert len(text([])) < len(text([AUXILIARY, LOAD]))
    assert "log" not in text([])


def test_metrics_of_the_load():
    loads = {"blocks/moe/router": jnp.array([[4.0, 4.0, 4.0, 4.0], [12.0, 4.0, 0.0, 0.0]])}
    metrics = {name: values.tolist() for name, values in load_metrics(loads, 2).items()}
    assert metrics == {
        "moe/max_load": [1.0, 3.0],
        "moe/min_load": [1.0, 0.0],
        "moe/dead_experts": [0.0, 2.0],
        "moe/max_device_load": [1.0, 2.0],
    }
    assert "moe/max_device_load" not in load_metrics(loads, 1)


def test_biases_move_towards_the_mean_load_and_other_updates_stay():
    updates = {"blocks": {"moe": {"router": {"balance_bias": jnp.zeros((1, 3)), "kernel": jnp.ones(2)}}}}
    new = balanced(updates, {"blocks/moe/router": jnp.array([[1.0, 2.0, 3.0]])}, 0.1)
    assert new["blocks"]["moe"]["router"]["balance_bias"].tolist() == [pytest.approx([0.1, 0.0, -0.1])]
    assert new["blocks"]["moe"]["router"]["kernel"].tolist() == [1, 1]
