"""Sophia, skipping of bad steps, and selection of decaying parameters, compared with plain implementations."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from lmtrain.optim.config import AdamConfig, SkipStepConfig, SophiaHConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.optim.transforms import decay_mask, scale_by_sophia, skip_bad_steps
from lmtrain.runtime.errors import UserError

RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.normal(size=(3, 2)).astype(np.float32), "b": RNG.normal(size=4).astype(np.float32)}
DEFAULTS = {
    "beta1": 0.9,
    "beta2": 0.8,
    "epsilon": 1e-3,
    "gamma": 0.5,
    "clip_threshold": 1.0,
    "update_interval": 3,
    "rng_seed": 7,
}


def estimate(key):
    """Random values for each parameter, about a third of them negative."""
    keys = dict(zip(PARAMS, jax.random.split(key), strict=True))
    return {name: 0.5 + jax.random.normal(keys[name], leaf.shape) for name, leaf in PARAMS.items()}


def plain_sophia(gradients, estimates, beta1, beta2, epsilon, gamma, clip_threshold, update_interval, rng_seed):
    """The updates of one leaf, in float64; `estimates[t]` is the Hessian estimate of step t."""
    m = h = np.zeros(gradients[0].shape)
    updates = []
    for t, g in enumerate(gradients):
        m = beta1 * m + (1 - beta1) * g
        if t % update_interval == 0:
            h = beta2 * h + (1 - beta2) * estimates[t]
        update = m / (1 - beta1 ** (t + 1)) / np.maximum(gamma * h, epsilon)
        updates.append(update if clip_threshold is None else np.clip(update, -clip_threshold, clip_threshold))
    return updates


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_threshold": None, "update_interval": 1, "beta2": 0.99},
        {"clip_threshold": 0.05, "gamma": 0.01, "beta1": 0.0},
    ],
    ids=str,
)
def test_updates_follow_the_formula(settings):
    settings = DEFAULTS | settings
    optimizer = scale_by_sophia(SophiaHConfig(**settings))
    gradients = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), PARAMS) for _ in range(12)]
    state, found = optimizer.init(PARAMS), []
    update = jax.jit(functools.partial(optimizer.update, hessian=estimate))
    for gradient in gradients:
        direction, state = update(gradient, state)
        found.append(direction)
    estimates = [estimate(jax.random.fold_in(jax.random.key(settings["rng_seed"]), t)) for t in range(12)]
    for name in PARAMS:
        expected = plain_sophia([g[name] for g in gradients], [np.float64(e[name]) for e in estimates], **settings)
        np.testing.assert_allclose([u[name] for u in found], expected, rtol=1e-4, atol=1e-5)


def test_the_hessian_is_estimated_only_when_due_with_a_new_key_each_time():
    interval, called = 3, []

    def marker(key):
        jax.debug.callback(lambda data: called.append(tuple(data.tolist())), jax.random.key_data(key))
        return jax.tree.map(jnp.ones_like, PARAMS)

    optimizer = scale_by_sophia(SophiaHConfig(**DEFAULTS | {"update_interval": interval}))
    update, state = jax.jit(functools.partial(optimizer.update, hessian=marker)), optimizer.init(PARAMS)
    counts, marks = [], []
    for _ in range(21):
        _, state = update(PARAMS, state)
        jax.effects_barrier()
        counts.append(len(called))
        marks.append(float(state.hessian["b"][0]))
    due = [t // interval + 1 for t in range(21)]  # at steps 0, interval, 2 * interval, ...
    assert counts == due
    np.testing.assert_allclose(marks, [1 - 0.8**number for number in due], rtol=1e-5)
    assert len(set(called)) == len(called)
    assert int(state.step) == 21


def test_moments_have_the_parameters_types_and_updates_the_gradients():
    optimizer = scale_by_sophia(SophiaHConfig(**DEFAULTS))
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    update, state = optimizer.update(half, optimizer.init(half), hessian=estimate)  # the estimate is float32
    assert {leaf.dtype for leaf in jax.tree.leaves((update, state.mu))} == {jnp.bfloat16.dtype}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.hessian)} == {jnp.float32.dtype}


TWO = {"a": np.float32([1, 2]), "b": np.float32([3])}
DIRECTION = {"a": np.float32([0.48, 0.36]), "b": np.float32([-0.8])}  # of norm 1


def gradient_of_norm(norm: float):
    return jax.tree.map(lambda x: x * np.float32(norm), DIRECTION)


class Plain:
    """Reimplementation with Python floats: call `skips(loss, norm)` for each step."""

    def __init__(self, length: int, sigma_factor: float):
        self.length, self.sigma_factor = length, sigma_factor
        self.losses: list[float] = []
        self.norms: list[float] = []

    def skips(self, loss: float, norm: float) -> bool:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return True
        enough = len(self.losses) >= max(2, self.length / 2)
        skip = enough and (self._is_high(loss, self.losses) or self._is_high(norm, self.norms))
        self.losses.append(loss)
        self.norms.append(norm)
        return skip

    def _is_high(self, value: float, past: list[float]) -> bool:
        last = past[-self.length :]
        mean = sum(last) / len(last)
        return value > mean + self.sigma_factor * math.sqrt(sum((x - mean) ** 2 for x in last) / len(last))


def random_steps(seed: int, number: int) -> list[tuple[float, float]]:
    """Losses and norms around a falling mean, some far above it, some not finite."""
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(number):
        loss, norm = 5 - step / number + rng.normal() * 0.3, 1 + abs(rng.normal()) * 0.2
        kind = rng.random()
        if kind < 0.03:
            loss *= rng.uniform(1.3, 5)
        elif kind < 0.06:
            norm *= rng.uniform(1.5, 50)
        elif kind < 0.08:
            loss = [math.nan, math.inf, -math.inf][rng.integers(3)]
        elif kind < 0.1:
            norm = [math.nan, math.inf][rng.integers(2)]
        steps.append((loss, norm))
    return steps


@pytest.mark.parametrize(("length", "sigma_factor"), [(2, 1.0), (32, 3.0)])
def test_the_same_steps_are_skipped_as_by_a_plain_reimplementation(length, sigma_factor):
    inner = optax.scale_by_adam()
    optimizer = skip_bad_steps(inner, length, sigma_factor)
    update, inner_update = jax.jit(optimizer.update), jax.jit(inner.update)
    state, kept = optimizer.init(TWO), inner.init(TWO)
    plain = Plain(length, sigma_factor)
    skipped = []
    for step, (loss, norm) in enumerate(random_steps(length, 300)):
        gradient = gradient_of_norm(norm)
        # the float32 values that the optimizer uses, so that rounding cannot change a decision
        skip = plain.skips(float(np.float32(loss)), float(jnp.float32(optax.tree.norm(gradient))))
        updates, state = update(gradient, state, TWO, loss=np.float32(loss))
        if skip:
            skipped.append(step)
            expected = jax.tree.map(np.zeros_like, TWO)
        else:
            expected, kept = inner_update(gradient, kept)
        for found, wanted in zip(
            jax.tree.leaves((updates, state.inner)), jax.tree.leaves((expected, kept)), strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=f"step {step}")
        assert int(state.skipped) == len(skipped), step
    assert 15 < len(skipped) < 200
    assert int(state.seen) == len(plain.losses)


def test_in_an_optimizer_norms_are_taken_before_clipping_and_skipped_steps_do_not_decay():
    config = AdamConfig(
        skip_bad_steps={"rolling_interval_length": 4, "sigma_factor": 3}, weight_decay=0.5, max_grad_norm=1
    )
    optimizer = build_optimizer(config, lambda count: 0.1)
    params = {"kernel": np.float32([[1, 2]])}
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = optimizer.update({"kernel": np.float32([[3, 4]])}, state, params, loss=np.float32(1))
        assert np.abs(updates["kernel"]).min() > 0
    # after clipping, all gradients here have norm 1
    updates, after = optimizer.update({"kernel": np.float32([[30, 40]])}, state, params, loss=np.float32(1))
    np.testing.assert_array_equal(updates["kernel"], [[0, 0]])
    assert int(optax.tree.get(after, "skipped")) == 1
    # the schedule counts skipped steps too
    assert int(after[-1].step) == int(state[-1].step) + 1 == 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, None),
        (True, SkipStepConfig(rolling_interval_length=128, sigma_factor=6.0)),
        (16, SkipStepConfig(rolling_interval_length=16, sigma_factor=6.0)),
        ({"sigma_factor": 2}, SkipStepConfig(rolling_interval_length=128, sigma_factor=2.0)),
    ],
)
def test_all_forms_of_the_setting(value, expected):
    config = AdamConfig(skip_bad_steps=value)
    assert config.skip_step == expected
    assert AdamConfig.model_validate_json(config.model_dump_json()).skip_step == expected
    losses = optax.tree.get(build_optimizer(config, lambda count: 0.1).init(TWO), "losses")
    assert losses is None if expected is None else losses.shape == (expected.rolling_interval_length,)


@pytest.mark.parametrize("value", [1, 2.5, {"rolling_interval_length": 1}, {"sigma_factor": 0}, {"length": 4}])
def test_invalid_intervals_are_refused(value):
    """`1` is an interval that is too short, and is not read as `true`."""
    with pytest.raises(ValidationError):
        AdamConfig(skip_bad_steps=value)


PATHS = [
    "blocks/attn/qkv/bias",
    "blocks/attn/qkv/kernel",
    "blocks/mlp/up/bias",
    "blocks/mlp/up/kernel",
    "blocks/norm_mlp/scale",
    "norm_final/scale",
    "tokens/embedding",
]
KERNELS = {"blocks/attn/qkv/kernel", "blocks/mlp/up/kernel"}
MLP = {"blocks/mlp/up/bias", "blocks/mlp/up/kernel"}
SCALES = {"blocks/norm_mlp/scale", "norm_final/scale"}


def tree() -> dict:
    params: dict = {}
    for path in PATHS:
        *parents, name = path.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = np.zeros(2)
    return params


def decaying(modules, mask) -> set[str]:
    config = AdamConfig(weight_decay_modules=modules, default_weight_decay_mask=mask)
    found = decay_mask(config, tree())
    leaves = jax.tree_util.tree_leaves_with_path(found)
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): decays for path, decays in leaves}
    assert sorted(names) == PATHS
    assert {type(decays) for decays in names.values()} == {bool}
    return {path for path, decays in names.items() if decays}


@pytest.mark.parametrize(
    ("modules", "mask", "expected"),
    [
        # no modules: the default rule, unless it is false
        (None, None, KERNELS),
        (None, False, set(PATHS)),
        # modules: only these, unless the default rule is true
        ("blocks/mlp", None, MLP),
        ("blocks/mlp", True, MLP | KERNELS),
        # a pattern is matched at the start of the path, not to its end
        ("blocks", None, {path for path in PATHS if path.startswith("blocks")}),
        ("(tokens|norm_final)/", None, {"tokens/embedding", "norm_final/scale"}),
        (r".*/(kernel|embedding)", True, KERNELS | {"tokens/embedding"}),
        # a text matches literally, anywhere in the path
        (["scale"], None, SCALES),
        (["mlp"], None, MLP | {"blocks/norm_mlp/scale"}),
    ],
)
def test_the_decaying_parameters(modules, mask, expected):
    assert decaying(modules, mask) == expected


@pytest.mark.parametrize(
    ("modules", "unknown", "mask"),
    [
        ("mlp", "mlp", None),  # not at the start
        (["blocks.mlp"], "blocks.mlp", True),  # a text, not a pattern
        (["scale", "nrom"], "nrom", False),
    ],
)
def test_a_module_without_match_is_a_user_error_that_lists_the_paths(modules, unknown, mask):
    with pytest.raises(UserError, match=f"weight_decay_modules: {unknown!r}.*{PATHS[-1]}"):
        decaying(modules, mask)


def test_an_invalid_regular_expression_is_refused_by_the_config():
    with pytest.raises(ValidationError, match="weight_decay_modules"):
        AdamConfig(weight_decay_modules="(")
    assert AdamConfig(weight_decay_modules=["("]).weight_decay_modules == ["("]  # a text need not be one
