"""Each optimizer compared with numpy in float64; weight decay, clipping, and the learning rate in the state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from lmtrain.optim.config import AdafactorConfig, AdamConfig, LionConfig, MuonConfig, SophiaGConfig, SophiaHConfig
from lmtrain.optim.optimizer import LearningRateState, build_optimizer
from lmtrain.optim.transforms import initial_values
from lmtrain.runtime.errors import UserError
from lmtrain.sharding.axes import Axes

RNG = np.random.default_rng(0)
PARAMS = {
    "tokens": {"embedding": RNG.normal(size=(3, 2)).astype(np.float32)},
    "layer": {"kernel": RNG.normal(size=(2, 2)).astype(np.float32), "bias": RNG.normal(size=2).astype(np.float32)},
    "norm": {"scale": RNG.normal(size=2).astype(np.float32)},
}
AXES = {
    "tokens": {"embedding": Axes(("vocab", "embed"))},
    "layer": {"kernel": Axes(("embed", "mlp"), 1), "bias": Axes(("mlp",))},
    "norm": {"scale": Axes(("embed",))},
}
GRADIENTS = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), PARAMS) for _ in range(2)]

OPTIMIZERS = {
    "adam": AdamConfig(),
    "adam that skips": AdamConfig(skip_bad_steps=True),
    "sophia-g": SophiaGConfig(),
    "lion": LionConfig(),
    "muon": MuonConfig(),
    "adafactor": AdafactorConfig(momentum=0.9),
}


@functools.cache
def compiled(name: str, weight_decay: float):
    """(gradient, state, rates) -> (updates, state) of one of `OPTIMIZERS`, for any rates."""
    config = OPTIMIZERS[name].model_copy(update={"weight_decay": weight_decay})
    return one_step(config, PARAMS, AXES)


def one_step(config, params, axes):
    more = {"loss": jnp.float32(1), "hessian": lambda key: jax.tree.map(jnp.ones_like, params)}

    def update(gradient, state, rates):
        return build_optimizer(config, lambda count: rates[count], axes).update(gradient, state, params, **more)

    return jax.jit(update)


def follow(step, state, gradients: list, rates):
    """The updates for each of the gradients, all at the same parameters, and the last state."""
    updates = []
    for gradient in gradients:
        update, state = step(gradient, state, jnp.float32(rates))
        updates.append(update)
    return updates, state


def steps(config, gradients: list, rates, params=PARAMS, axes=AXES):
    state = build_optimizer(config, lambda count: rates[0], axes).init(params)
    return follow(one_step(config, params, axes), state, gradients, rates)


def steps_of(name: str, rates, weight_decay: float = 0.0):
    state = build_optimizer(OPTIMIZERS[name], lambda count: rates[0], AXES).init(PARAMS)
    return follow(compiled(name, weight_decay), state, GRADIENTS, rates)


def run(config, gradients: list, rate=lambda count: 0.1, params=PARAMS, axes=None):
    optimizer = build_optimizer(config, rate, axes)

    def all_of_them(params, gradients):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return jax.jit(all_of_them)(params, gradients)


def plain_adamw(params, gradients, rates, b1, b2, eps, decay, nesterov=False):
    """AdamW of one leaf, in float64."""
    m = v = 0.0
    p = params.astype(np.float64)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.square(g)
        first = m / (1 - b1**t)
        if nesterov:  # Dozat 2016: the known part of the next step's momentum
            first = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        p = p - rate * (first / (np.sqrt(v / (1 - b2**t)) + eps) + decay * p)
    return p


@pytest.mark.parametrize(("path", "decays"), [(("layer", "kernel"), True), (("norm", "scale"), False)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_two_updates_are_adamw_with_decay_on_kernels_only(path, decays, nesterov):
    config = AdamConfig(weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-3, max_grad_norm=None, nesterov=nesterov)
    params = run(config, GRADIENTS, rate=lambda count: 0.1 / (count + 1))
    leaf = [tree[path[0]][path[1]] for tree in (PARAMS, *GRADIENTS)]
    decay = 0.3 if decays else 0.0
    expected = plain_adamw(leaf[0], leaf[1:], [0.1, 0.05], 0.8, 0.9, 1e-3, decay, nesterov)
    np.testing.assert_allclose(params[path[0]][path[1]], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_parameters_of_a_group_have_its_rate_betas_and_decay(nesterov):
    """The first group that matches counts; what it leaves out is the optimizer's."""
    groups = [
        {"match": "tokens/", "learning_rate": 3e-2, "beta1": 0.5, "weight_decay": 0.7},
        {"match": "tokens|norm", "beta2": 0.6},
        {"match": "layer/bias", "learning_rate": 4e-3},
    ]
    config = AdamConfig(
        learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-3, max_grad_norm=None, nesterov=nesterov,
        groups=groups,
    )  # fmt: skip
    params = run(config, GRADIENTS, rate=lambda count: 0.1 / (count + 1))
    expected = {  # rate, beta1, beta2, decay
        ("tokens", "embedding"): (3e-2, 0.5, 0.9, 0.7),
        ("layer", "kernel"): (0.1, 0.8, 0.9, 0.3),
        ("layer", "bias"): (4e-3, 0.8, 0.9, 0.0),
        ("norm", "scale"): (0.1, 0.8, 0.6, 0.0),
    }
    for (part, name), (rate, beta1, beta2, decay) in expected.items():
        leaf = [tree[part][name] for tree in (PARAMS, *GRADIENTS)]
        own = plain_adamw(leaf[0], leaf[1:], [rate, rate / 2], beta1, beta2, 1e-3, decay, nesterov)
        np.testing.assert_allclose(params[part][name], own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config", [AdamConfig(), MuonConfig(), LionConfig(), AdafactorConfig(), SophiaGConfig()], ids=lambda c: c.type
)
def test_rate_and_decay_of_a_group_scale_the_updates_of_any_optimizer(config):
    """A group's rate is relative to the one that its parameters have without it, with Muon also Adam's."""
    embedding = config.adam_lr if isinstance(config, MuonConfig) else config.learning_rate
    groups = [
        {"match": "tokens", "learning_rate": 3 * embedding, "weight_decay": 0},
        {"match": "layer/kernel", "learning_rate": 2 * config.learning_rate, "weight_decay": 0.5},
    ]
    plain = steps(config, GRADIENTS, (0.1, 0.1))[0]
    for before, after in zip(
        plain, steps(type(config)(groups=groups, weight_decay=0.1), GRADIENTS, (0.1, 0.1))[0], strict=True
    ):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
        close(after["tokens"]["embedding"], 3 * before["tokens"]["embedding"])
        kernel = before["layer"]["kernel"] - 0.1 * 0.5 * PARAMS["layer"]["kernel"]
        close(after["layer"]["kernel"], 2 * kernel)
        close(after["norm"]["scale"], before["norm"]["scale"])


def test_groups_keep_the_state_of_the_optimizer_so_that_a_run_resumes_with_others():
    groups = [{"match": "layer", "learning_rate": 1.0}, {"match": "tokens", "beta1": 0.5}]
    for config in (AdamConfig, MuonConfig):
        states = [build_optimizer(c, lambda _: 0.1, AXES).init(PARAMS) for c in (config(), config(groups=groups))]
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), state) for state in states]
        assert shapes[0] == shapes[1]
        assert len({jax.tree.structure(state) for state in states}) == 1


@pytest.mark.parametrize(
    ("config", "groups", "number"),
    [
        (AdamConfig, [{"match": "blocks", "learning_rate": 1}], 0),
        (AdamConfig, [{"match": "layer", "learning_rate": 1}, {"match": "layer/kernel", "weight_decay": 0}], 1),
        (MuonConfig, [{"match": "layer/kernel", "beta2": 0.5}], 0),
        (AdamConfig, [{"match": "layer", "initial_std": 0.5}], 0),
    ],
    ids=["matches nothing", "behind an earlier one", "betas of Muon's matrices", "initial values of biases"],
)
def test_groups_without_effect_are_errors(config, groups, number):
    with pytest.raises(UserError, match=rf"optimizer\.groups\[{number}\]: '{groups[number]['match']}'"):
        build_optimizer(config(groups=groups), lambda _: 0.1, AXES).init(PARAMS)


def test_initial_values_of_a_group_are_random_ones_of_its_own():
    groups = [{"match": "tokens", "initial_std": 2.0}, {"match": "layer/kernel", "initial_std": 0.0}]
    params = {part: {name: jnp.ones((64, 64)) for name in values} for part, values in PARAMS.items()}
    found = initial_values(AdamConfig(groups=groups), jax.random.key(0), params)
    assert float(found["tokens"]["embedding"].std()) == pytest.approx(2.0, rel=0.05)
    assert float(found["tokens"]["embedding"].mean()) == pytest.approx(0.0, abs=0.1)
    assert not found["layer"]["kernel"].any()
    assert all((found[part][name] == 1).all() for part, name in (("layer", "bias"), ("norm", "scale")))
    other = initial_values(AdamConfig(groups=groups[:1]), jax.random.key(1), params)
    assert (other["tokens"]["embedding"] != found["tokens"]["embedding"]).any()


def test_settings_of_groups_are_checked():
    wrong = {"match": "match", "beta1": "groups"}
    for config, group in ((AdamConfig, {"match": "layer"}), (LionConfig, {"match": "layer", "beta1": 0.5})):
        with pytest.raises(ValidationError) as found:
            config(groups=[group])
        assert wrong[list(group)[-1]] in str(found.value)
    with pytest.raises(ValidationError, match="regular expression"):
        AdamConfig(groups=[{"match": "(", "learning_rate": 1}])


@pytest.mark.parametrize("config", [AdamConfig(), MuonConfig()], ids=lambda c: c.type)
def test_gradients_are_clipped_to_the_global_norm_first(config):
    """Checked in the second update, where the gradient's weight in the momentum depends on its size."""
    clipping = config.model_copy(update={"max_grad_norm": 0.5})
    small = jax.tree.map(lambda g: g * np.float32(1e-2), GRADIENTS[1])
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(GRADIENTS[0])))
    scaled = jax.tree.map(lambda g: g * np.float32(0.5 / norm), GRADIENTS[0])
    not_clipping = one_step(clipping.model_copy(update={"max_grad_norm": None}), PARAMS, AXES)
    state = build_optimizer(clipping, lambda count: 0.1, AXES).init(PARAMS)
    without = build_optimizer(config.model_copy(update={"max_grad_norm": None}), lambda count: 0.1, AXES)
    clipped, _ = follow(one_step(clipping, PARAMS, AXES), state, [small, GRADIENTS[0]], (0.1, 0.1))
    by_hand, _ = follow(not_clipping, without.init(PARAMS), [small, scaled], (0.1, 0.1))
    unclipped, _ = follow(not_clipping, without.init(PARAMS), [small, GRADIENTS[0]], (0.1, 0.1))
    for one, other in zip(jax.tree.leaves(clipped[1]), jax.tree.leaves(by_hand[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert not np.allclose(clipped[1]["layer"]["kernel"], unclipped[1]["layer"]["kernel"], rtol=1e-3)


@pytest.mark.parametrize("limit", [0.0, 1e6])
def test_zero_and_a_high_limit_do_not_clip(limit):
    one, expected = (run(AdamConfig(max_grad_norm=each, epsilon=0.1), [GRADIENTS[0]]) for each in (limit, None))
    np.testing.assert_allclose(one["layer"]["kernel"], expected["layer"]["kernel"], rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_multiplied_by_the_rate_and_not_part_of_the_moments(name):
    """Both updates differ from those without decay by exactly rate * decay * parameter."""
    bare, _ = steps_of(name, (0.5, 0.25))
    decayed, _ = steps_of(name, (0.5, 0.25), weight_decay=0.3)
    for rate, without, with_decay in zip((0.5, 0.25), bare, decayed, strict=True):
        more = jax.tree.map(lambda a, b: a - b, with_decay, without)
        np.testing.assert_allclose(more["layer"]["kernel"], -rate * 0.3 * PARAMS["layer"]["kernel"], atol=1e-6)
        for leaf in (more["layer"]["bias"], more["norm"]["scale"], more["tokens"]["embedding"]):
            np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_proportional_to_the_negative_rate_of_their_step_which_the_state_has(name):
    once, _ = steps_of(name, (1, 1))
    slower, (*_, learning) = steps_of(name, (0.5, 0.125))
    assert isinstance(learning, LearningRateState)
    assert (int(learning.step), learning.step.dtype) == (2, np.int32)
    assert (float(learning.learning_rate), learning.learning_rate.dtype) == (0.125, np.float32)
    for rate, fast, slow in zip((0.5, 0.125), once, slower, strict=True):
        for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
            np.testing.assert_allclose(other, rate * one, rtol=1e-6)
            assert np.abs(one).max() > 0
    # the first update goes down the gradient
    for update, gradient in zip(jax.tree.leaves(once[0]), jax.tree.leaves(GRADIENTS[0]), strict=True):
        assert (np.asarray(update) * gradient).sum() < 0


def test_lion_is_the_sign_of_an_interpolated_momentum():
    config = LionConfig(beta1=0.7, beta2=0.9, max_grad_norm=None)
    gradients = [RNG.normal(size=(2, 2)) for _ in range(6)]
    trees = [PARAMS | {"layer": PARAMS["layer"] | {"kernel": g.astype(np.float32)}} for g in gradients]
    updates, _ = steps(config, trees, [0.1] * 6)
    momentum = np.zeros((2, 2))
    for gradient, update in zip(gradients, updates, strict=True):
        expected = -0.1 * np.sign(0.7 * momentum + 0.3 * gradient)
        np.testing.assert_allclose(update["layer"]["kernel"], expected, rtol=1e-6)
        momentum = 0.9 * momentum + 0.1 * gradient


def rms(x) -> float:
    return np.sqrt(np.square(x).mean())


def plain_adafactor(p, gradients, rate, factored, decay_rate, clipping, scaled, momentum):
    """One matrix, in float64: Shazeer and Stern 2018, algorithms 2 and 4."""
    p = p.astype(np.float64)
    v, m = np.zeros_like(p), np.zeros_like(p)
    rows, columns = np.zeros(p.shape[0]), np.zeros(p.shape[1])
    for t, g in enumerate(gradients, start=1):
        g = g.astype(np.float64)
        kept = 1 - t**-decay_rate
        rows = kept * rows + (1 - kept) * np.square(g).mean(1)
        columns = kept * columns + (1 - kept) * np.square(g).mean(0)
        v = np.outer(rows, columns) / rows.mean() if factored else kept * v + (1 - kept) * np.square(g)
        u = g / np.sqrt(v)
        if clipping is not None:
            u = u / max(1, rms(u) / clipping)
        if scaled:
            u = u * max(rms(p), 1e-3)
        if momentum is not None:
            u = m = momentum * m + (1 - momentum) * u
        p = p - rate * u
    return p


@pytest.mark.parametrize(
    "settings",
    [
        {"clipping_threshold": None, "momentum": 0.9},
        {"multiply_by_parameter_scale": False, "decay_rate": 0.5},
        {"min_dim_size_to_factor": 7},  # the matrix has 6 rows: its second moment is not factored
    ],
    ids=str,
)
def test_adafactor_follows_the_paper(settings):
    config = AdafactorConfig(**{"min_dim_size_to_factor": 6, **settings})
    matrix = RNG.normal(size=(6, 8)).astype(np.float32) * 0.1
    # of growing size, so that a late one is clipped
    gradients = [(RNG.normal(size=(6, 8)) * 3**t).astype(np.float32) for t in range(4)]
    params = run(
        config, [{"kernel": g} for g in gradients], lambda count: 0.1, {"kernel": matrix}, {"kernel": ("embed", "mlp")}
    )
    expected = plain_adafactor(
        matrix,
        gradients,
        0.1,
        config.min_dim_size_to_factor == 6,
        config.decay_rate,
        config.clipping_threshold,
        config.multiply_by_parameter_scale,
        config.momentum,
    )
    np.testing.assert_allclose(params["kernel"], expected, rtol=1e-4, atol=1e-6)


def test_adafactor_factors_the_matrices_of_attention_whatever_a_heads_width():
    """Rows and columns are those of the full projection; gradients keep their shape."""
    axes = {"qkv": ("layers", "embed", "qkv", "heads", "head_dim"), "out": ("layers", "kv_heads", "head_dim", "embed")}
    params = {"qkv": np.ones((2, 256, 3, 4, 64), np.float32), "out": np.ones((2, 4, 64, 256), np.float32)}
    optimizer = build_optimizer(AdafactorConfig(), lambda count: 0.1, axes)
    state = optimizer.init(params)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 1)
    assert sizes == sorted([2 * 3 * 256, 2 * 3 * 256, 2 * 256, 2 * 256])
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
    updates, _ = jax.jit(lambda g, s: optimizer.update(g, s, params))(gradients, state)
    for name, found in updates.items():
        assert found.shape == params[name].shape
    # the first second moments are those of the gradient: Shazeer and Stern 2018, algorithm 4 with beta_2 = 0
    squares = np.square(gradients["out"].astype(np.float64)).reshape(2, 256, 256)
    rows, columns = squares.mean(2), squares.mean(1)
    scale = np.sqrt(rows[:, :, None] * columns[:, None, :] / rows.mean(1)[:, None, None])
    direction = gradients["out"].reshape(2, 256, 256) / scale
    direction /= max(1.0, np.sqrt(np.square(direction).mean()))
    np.testing.assert_allclose(updates["out"].reshape(2, 256, 256), -0.1 * direction, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        AdamConfig(beta2=0.999),
        LionConfig(),
        AdafactorConfig(momentum=0.9, multiply_by_parameter_scale=False),
        SophiaHConfig(beta2=0.999, update_interval=1, clip_threshold=None),
    ],
    ids=lambda c: c.type,
)
def test_moments_of_parameters_in_bfloat16_follow_smaller_gradients(config):
    """A second moment in bfloat16 would keep its largest value, since 0.1 % less is rounded to the same."""
    config = config.model_copy(update={"weight_decay": 0.0, "max_grad_norm": None})
    gradient = jax.tree.map(lambda g: jnp.asarray(g, jnp.bfloat16), GRADIENTS[0])
    sizes = jnp.where(jnp.arange(2000) < 200, 1.0, 1 / 16)

    def last_update(dtype):
        params = jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)
        optimizer = build_optimizer(config, lambda count: 1.0, AXES)

        def step(state, size):
            g = jax.tree.map(lambda g: g.astype(dtype) * size.astype(dtype), gradient)
            hessian = jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)), g)
            updates, state = optimizer.update(g, state, params, loss=size, hessian=lambda key: hessian)
            return state, updates

        _, updates = jax.jit(jax.lax.scan, static_argnums=0)(step, optimizer.init(params), sizes)
        # without the matrix, whose update Muon computes in bfloat16
        return [np.float64(updates[layer][name][-1]) for layer, name in (("tokens", "embedding"), ("layer", "bias"))]

    for found, expected in zip(last_update("bfloat16"), last_update("float32"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0.15)
