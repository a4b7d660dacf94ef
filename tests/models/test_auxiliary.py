"""Auxiliary losses in training steps, against numpy in float64."""

import jax
import numpy as np
import pytest
from models import families, quick
from models.families import BATCH, ROUTED, SIZE, VOCAB, auxiliary_model

from lmtrain.evaluation.eval_step import build_eval_step
from lmtrain.models.params import add_auxiliary, has_auxiliary
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.train.step.hessian import estimate_hessian

MODEL = auxiliary_model()
VALUES = quick.random_params(MODEL, 0.5)


def in_numpy(params) -> tuple[float, float, float, float]:
    """Cross-entropy, both auxiliary losses, and the fraction of positive values."""
    table, mix = params["tokens"]["embedding"], params["blocks"]["mix"]
    x = table[BATCH["tokens"]]
    size, total, weight, fractions = 0.0, 0.0, 0.0, []
    for kernel, bias in zip(mix["kernel"], mix["bias"], strict=True):
        x = x + np.tanh(x @ kernel + bias)
        routed = x[..., 0] > 0
        size += np.square(x).mean((1, 2)).mean() / len(mix["bias"])
        total, weight = total + (routed * x[..., 1] ** 3).sum(), weight + routed.sum()
        fractions.append(routed.mean())
    centred = x - x.mean(-1, keepdims=True)
    norm = params["norm_final"]
    x = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]
    logits = (x @ table.T)[..., :VOCAB]
    chosen = np.take_along_axis(logits, np.roll(BATCH["tokens"], -1, 1)[..., None], -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - chosen
    return (losses * BATCH["loss_mask"]).sum() / BATCH["loss_mask"].sum(), size, total / weight, np.mean(fractions)


def loss_in_numpy(params) -> float:
    loss, size, routed, _ = in_numpy(params)
    return loss + SIZE * size + ROUTED * routed


PATTERN = {"period": 2, "gradient_checkpointing": "dots", "scan_layers": False}


@pytest.mark.parametrize(("changes", "microbatches"), [({}, 4), (PATTERN, 1)], ids=["scan", "pattern"])
def test_metrics_and_gradients_are_those_of_numpy(changes, microbatches):
    step = quick.build_step(auxiliary_model(**changes), microbatches=microbatches)
    state, metrics, _ = step(quick.new_state(VALUES), BATCH)
    wide = jax.tree.map(np.float64, VALUES)
    names = ("train/loss", "train/size", "train/routed", "train/routed_fraction")
    assert [float(metrics[name]) for name in names] == pytest.approx(in_numpy(wide), rel=1e-5)
    gradients = jax.tree.map(np.float64, state.opt_state[0].trace)
    rng, step_size = np.random.default_rng(5), 1e-6
    for number in range(4):
        direction = jax.tree.map(lambda p: rng.normal(size=p.shape), wide)
        ahead, behind = (
            loss_in_numpy(jax.tree.map(lambda p, d, s=sign: p + s * step_size * d, wide, direction)) for sign in (1, -1)
        )
        along = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction)))
        assert along == pytest.approx((ahead - behind) / (2 * step_size), rel=1e-4), number


def program(model, build=None) -> str:
    build = build or (lambda model: quick.build_step(model, microbatches=4).lower(quick.new_state(VALUES), BATCH))
    return build(model).as_text()


@pytest.fixture
def without(monkeypatch):
    """Programs of the same model without auxiliary losses, or with those of some names only."""

    def only(*names, build=None) -> str:
        def some(module, name, *arguments):
            if name in names:
                add_auxiliary(module, name, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(families, "add_auxiliary", some)
            has_auxiliary.cache_clear()
            text = program(MODEL, build)
        has_auxiliary.cache_clear()
        return text

    return only


def test_weights_that_depend_on_the_batch_only_cost_no_products(without):
    def products(text):
        return text.count("stablehlo.dot_general")

    assert products(without("train/size")) == products(without())
    assert products(program(MODEL)) > products(without())


def eval_program(model):
    return build_eval_step(model, quick.LAYOUT, "float32").lower(VALUES, BATCH)


def hessian_program(model):
    def estimate(params, key):
        return estimate_hessian("hutchinson", model, CrossEntropy(), params, BATCH, key, 2)

    return jax.jit(estimate).lower(VALUES, jax.random.key(0))


@pytest.mark.parametrize("build", [eval_program, hessian_program])
def test_evaluation_and_the_hessian_leave_auxiliary_losses_out(without, build):
    assert program(MODEL, build) == without(build=build)


@pytest.mark.parametrize(
    ("new", "message"), [("loss", "train/loss: this name is reserved"), ("routed", "train/routed has two coefficients")]
)
def test_a_name_that_is_used_otherwise_is_refused(monkeypatch, new, message):
    def renamed(module, name, *more):
        add_auxiliary(module, name.replace("size", new), *more)

    monkeypatch.setattr(families, "add_auxiliary", renamed)
    with pytest.raises(ValueError, match=message):
        program(MODEL)
