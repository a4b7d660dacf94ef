"""Logging from inside the compiled step: values are returned as its outputs, and without logging nothing changes."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import quick

from lmtrain.evaluation.eval_step import build_eval_step
from lmtrain.models.gpt2 import model as gpt2
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.interface import NO_DOCUMENTS
from lmtrain.models.layers.stack import Pattern, stack
from lmtrain.tracking.jit_log import METRICS, collecting, jit_log
from lmtrain.train.step.state import state_shardings

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def floats(metrics):
    return {name: float(value) for name, value in metrics.items()}


def logged_by(function, *arguments):
    """The values that `function` logs when it is compiled."""

    def collected(*arguments):
        with collecting() as logged:
            function(*arguments)
        return logged.means

    return floats(jax.jit(collected)(*arguments))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (lambda x: jit_log({"a": x.sum(), "b": x[0, 1]}), {"a": 15.0, "b": 1.0}),
        (lambda x: jit_log({"count": (x > 1).sum(), "share": x > 1}), {"count": 4.0, "share": pytest.approx(4 / 6)}),
        (lambda x: jit_log({"half": x.astype(jnp.bfloat16)[1, 2], "python": 3}), {"half": 5.0, "python": 3.0}),
        # arrays and several calls are averaged: 2.5, 3.5 and 4
        (lambda x: [jit_log({"a": value}) for value in (x, 3.5, x[1])], {"a": pytest.approx(10 / 3)}),
        (lambda x: jit_log({"a": jax.lax.scan(lambda c, row: (c, row.max()), 0.0, x)[1]}), {"a": 3.5}),
    ],
)
def test_values_of_a_compiled_function_are_returned(log, expected):
    assert logged_by(log, X) == expected


def in_scan(log):
    return lambda x: jax.lax.scan(lambda carry, row: (carry, log(row)), 0.0, x)


NESTED = {
    "scan": in_scan,
    "cond": lambda log: lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: log(y) or 0, lambda y: 0, x),
    "while": lambda log: lambda x: jax.lax.fori_loop(0, 3, lambda i, y: log(y) or y, x),
    "checkpoint": lambda log: jax.checkpoint(lambda x: log(x) or x),
    "grad": lambda log: jax.grad(lambda x: log(x) or x.sum()),
    "vmap": lambda log: jax.vmap(lambda x: log(x) or x),
    "jit": lambda log: jax.jit(lambda x: log(x) or x),
}


@pytest.mark.parametrize(("kind", "within_a_module"), [*((kind, False) for kind in NESTED), ("scan", True)])
def test_logging_inside_a_nested_transformation_is_refused_with_advice(kind, within_a_module):
    def log(x):
        jit_log({"train/mine": x})

    class Module(nn.Module):
        @nn.compact
        def __call__(self, x):
            NESTED[kind](log)(x)

    def function(x):
        if within_a_module:
            Module().apply({}, x, mutable=[METRICS])
        else:
            NESTED[kind](log)(x)

    with pytest.raises(ValueError, match="'train/mine'"):
        logged_by(function, X)


def test_without_a_collector_nothing_is_collected_or_computed():
    def silent(x):
        return x * 2

    def logging(x):
        jit_log({"a": x})
        return silent(x)

    assert str(jax.make_jaxpr(logging)(X)) == str(jax.make_jaxpr(silent)(X))
    with collecting() as logged:
        pass
    jit_log({"a": 1.0})
    assert logged.means == {}


def test_the_innermost_collector_collects_and_is_removed_after_an_error():
    with collecting() as outer:
        with collecting() as inner:
            jit_log({"a": 1.0})
        with pytest.raises(KeyError), collecting():
            raise KeyError
        jit_log({"b": 2.0})
    assert (floats(inner.means), floats(outer.means)) == ({"a": 1.0}, {"b": 2.0})


class Block(nn.Module):
    """A layer as in `stack`: adds a weight, and logs its input with both functions."""

    logs: bool = True

    @nn.compact
    def __call__(self, x, layer, deterministic, segments):
        if self.logs:
            jit_log({"layer": layer, "input": x})
            self.sow(METRICS, "sown", x.max())
        return x + self.param("w", nn.initializers.ones, ()), None

    def extend(self, state, layer, start):
        raise NotImplementedError


class Stacked(nn.Module):
    scan: bool
    policy: bool | str
    logs: bool = True

    def setup(self):
        self.blocks = stack(Block, Pattern((), ((self.logs,),)), 3, self.scan, self.policy)

    def __call__(self, x):
        return self.blocks(x, jnp.arange(3.0), True, None)[0]


class Looped(nn.Module):
    @nn.compact
    def __call__(self, x):
        for layer in range(3):
            x, _ = Block(name=f"block_{layer}")(x, layer, True, None)
        return x


STACKED, LOOPED = {"blocks": {"w": jnp.ones(3)}}, {f"block_{layer}": {"w": jnp.ones(())} for layer in range(3)}
CASES = [
    *((Stacked(scan, policy), STACKED) for scan, policy in ((True, False), (True, "dots"), (False, True))),
    (Looped(), LOOPED),
]


def logged_by_module(module, params):
    def loss(params, x):
        with collecting() as logged:
            out, sown = module.apply({"params": params}, x, mutable=[METRICS])
            logged.add_sown(sown)
        return out.sum(), logged.means

    return floats(jax.jit(jax.grad(loss, has_aux=True))(params, X)[1])


@pytest.mark.parametrize(("module", "params"), CASES)
def test_scanned_unrolled_recomputed_and_separate_layers_log_the_same(module, params):
    assert logged_by_module(module, params) == {"layer": 1.0, "input": 3.5, "sown": 6.0}


def test_a_module_that_is_called_twice_logs_the_mean():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = Block(name="block")
            return block(block(x, 0, True, None)[0], 4, True, None)[0]

    assert logged_by_module(Twice(), {"block": {"w": jnp.ones(())}}) == {"layer": 2.0, "input": 3.0, "sown": 5.5}


# The training step.

VOCAB = 24
CONFIG = Gpt2Config(hidden_dim=16, num_heads=2, num_layers=2, seq_len=8, mlp_scale=2)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (4, 8)).astype(np.int32)
BATCH = {"tokens": TOKENS, "loss_mask": np.ones((4, 8), bool)}
PLAIN = gpt2.Gpt2LM(CONFIG, VOCAB)
VALUES = quick.random_params(PLAIN, 0.3)


class LoggingBlock(gpt2.Gpt2Block):
    def __call__(self, x, layer, deterministic, documents):
        self.sow(METRICS, "train/layer", layer)
        return super().__call__(x, layer, deterministic, documents)


class LoggingLM(gpt2.Gpt2LM):
    name_of_loss: str = "train/mine"

    def hidden(self, tokens_BS, deterministic, documents=NO_DOCUMENTS):
        hidden = super().hidden(tokens_BS, deterministic, documents)
        jit_log({self.name_of_loss: jnp.square(hidden)})
        return hidden


def logging_optimizer(name="optim/mine"):
    def update(updates, state, params=None):
        jit_log({name: optax.tree.norm(updates)})
        return updates, state

    return optax.chain(optax.sgd(0.5), optax.GradientTransformation(lambda params: optax.EmptyState(), update))


def build(model=PLAIN, optimizer=None, microbatches=1):
    optimizer = optimizer or optax.sgd(0.5)
    step = quick.build_step(model, optimizer, microbatches)
    _, shardings = state_shardings(model, optimizer, quick.LAYOUT, "float32")
    return step, jax.device_put(quick.new_state(VALUES, optimizer), shardings)


@pytest.fixture(scope="module")
def plain():
    """The metrics of a step without logging."""
    step, state = build()
    return step(state, BATCH)[1]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def stepped(request):
    """A step of a model and an optimizer that log: its program as text, and the metrics of three steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2.Gpt2LM, "block", LoggingBlock)
        step, state = build(LoggingLM(CONFIG, VOCAB), logging_optimizer(), request.param)
        text, all_metrics = step.lower(state, BATCH).as_text(), []
        for _ in range(3):
            state, metrics, _ = step(state, BATCH)
            all_metrics.append(metrics)
        return SimpleNamespace(text=text, metrics=all_metrics, compiled=step.jitted._cache_size())


def test_the_metrics_of_the_step_include_those_of_model_and_optimizer(stepped, plain):
    metrics = stepped.metrics[0]
    hidden = np.asarray(PLAIN.apply({"params": VALUES}, TOKENS, True, method="hidden"))
    assert floats({name: value for name, value in metrics.items() if name not in plain}) == {
        "train/layer": 0.5,
        "train/mine": pytest.approx(np.square(hidden).mean(), rel=1e-5),
        "optim/mine": pytest.approx(0.5 * float(metrics["train/gradient_norm"]), rel=1e-5),
    }
    assert floats({name: metrics[name] for name in plain}) == pytest.approx(floats(plain), rel=1e-5)
    assert {str(value.dtype) for value in metrics.values()} == {"float32"}


def test_logging_needs_no_second_compilation_and_no_callback(stepped):
    assert stepped.compiled == 1
    assert "callback" not in stepped.text
    assert len({float(metrics["train/mine"]) for metrics in stepped.metrics}) == 3  # each step logs its own value


def test_logging_does_not_change_the_evaluation_program():
    def program(model):
        return build_eval_step(model, quick.LAYOUT, "float32").lower(VALUES, BATCH).as_text()

    assert program(LoggingLM(CONFIG, VOCAB)) == program(PLAIN)


@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_a_name_reserved_by_lmtrain_is_refused(where):
    model = LoggingLM(CONFIG, VOCAB, name_of_loss="train/loss") if where == "model" else PLAIN
    optimizer = logging_optimizer("train/learning_rate") if where == "optimizer" else None
    name = {"model": "train/loss", "optimizer": "train/learning_rate"}[where]
    step, state = build(model, optimizer)
    with pytest.raises(ValueError, match=name):
        step.lower(state, BATCH)
