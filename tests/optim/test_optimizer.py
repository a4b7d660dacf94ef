"""AdamW against plain numpy: two updates, what decays, clipping."""

import jax
import numpy as np
import optax
import pytest

from lmtrain.optim.config import AdamConfig
from lmtrain.optim.optimizer import build_optimizer

RNG = np.random.default_rng(0)
PARAMS = {
    "tokens": {"embedding": RNG.normal(size=(3, 2)).astype(np.float32)},
    "layer": {"kernel": RNG.normal(size=(2, 2)).astype(np.float32), "bias": RNG.normal(size=2).astype(np.float32)},
    "norm": {"scale": RNG.normal(size=2).astype(np.float32)},
}
GRADIENTS = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), PARAMS) for _ in range(2)]


def run(config: AdamConfig, gradients: list, rate=lambda count: 0.1):
    optimizer = build_optimizer(config, rate)
    params, state = PARAMS, optimizer.init(PARAMS)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def plain_adamw(params, gradients, rates, b1, b2, eps, decay):
    """One leaf, in float64."""
    m = v = 0.0
    p = params.astype(np.float64)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.square(g)
        p = p - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * p)
    return p


@pytest.mark.parametrize(
    ("path", "decays"),
    [(("layer", "kernel"), True), (("layer", "bias"), False), (("norm", "scale"), False), (("tokens", "embedding"), 0)],
)
def test_two_updates_are_adamw_with_decay_on_kernels_only(path, decays):
    config = AdamConfig(weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-3, max_grad_norm=None)
    params = run(config, GRADIENTS, rate=lambda count: 0.1 / (count + 1))
    leaf = [tree[path[0]][path[1]] for tree in (PARAMS, *GRADIENTS)]
    expected = plain_adamw(leaf[0], leaf[1:], [0.1, 0.05], 0.8, 0.9, 1e-3, 0.3 if decays else 0.0)
    np.testing.assert_allclose(params[path[0]][path[1]], expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_to_the_global_norm_before_adam():
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(GRADIENTS[0])))
    scaled = jax.tree.map(lambda g: g * np.float32(0.5 / norm), GRADIENTS[0])
    clipped = run(AdamConfig(max_grad_norm=0.5, epsilon=0.1), [GRADIENTS[0]])
    by_hand = run(AdamConfig(max_grad_norm=None, epsilon=0.1), [scaled])
    for one, other in zip(jax.tree.leaves(clipped), jax.tree.leaves(by_hand), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("limit", [None, 0.0, 1e6])
def test_null_zero_and_a_high_limit_clip_nothing(limit):
    one = run(AdamConfig(max_grad_norm=limit, epsilon=0.1), [GRADIENTS[0]])
    expected = plain_adamw(PARAMS["layer"]["kernel"], [GRADIENTS[0]["layer"]["kernel"]], [0.1], 0.9, 0.95, 0.1, 0.0)
    np.testing.assert_allclose(one["layer"]["kernel"], expected, rtol=1e-5)
