"""Tiny models with random parameters that need no compilation, and what their tests share."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from lmtrain.models.interface import NO_DOCUMENTS, Documents
from lmtrain.models.layers.linear import Embed, Linear
from lmtrain.models.registry import build_model
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.objectives.interface import LOSS, Weighted
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import Layout, MeshFunction, build_layout
from lmtrain.train.step.parts import choose_parts
from lmtrain.train.step.state import TEACHER, Frozen, TrainState, new_average, state_shardings
from lmtrain.train.step.step import TrainStep, build_train_step


def random_params(lm: nn.Module, scale: float = 0.4, seed: int = 1) -> Any:
    """Float32 parameters of a language model, all random and large enough to influence the result."""
    return random_like(jax.eval_shape(lm.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32)), scale, seed)


def random_like(variables: Any, scale: float = 0.4, seed: int = 1) -> Any:
    """Float32 parameters of a module, of which `variables` are the abstract ones."""
    rng = np.random.default_rng(seed)
    params = nn.meta.unbox(variables)["params"]
    return jax.tree.map(lambda p: (rng.normal(size=p.shape) * scale).astype(np.float32), params)


def writing_model(config: Any, vocab: int) -> tuple[Any, Any]:
    """A model, and parameters with which its texts vary."""
    lm = build_model(config, vocab)
    params = random_params(lm, 0.5, seed=3)
    if "bias" in params["norm_final"]:
        params["norm_final"]["bias"] *= 0  # it would favour the same token everywhere
    return lm, params


def changed_by_dropout(lm: nn.Module, plain: nn.Module, params: Any, tokens: np.ndarray) -> float:
    """Change of `lm`'s output by dropout in training; asserts that it evaluates as `plain`, which has no dropout."""
    assert (lm.has_dropout, plain.has_dropout) == (True, False)
    evaluation, without = (
        jax.make_jaxpr(lambda p, lm=lm: lm.apply({"params": p}, tokens, True, method="hidden"))(params)
        for lm in (lm, plain)
    )
    assert str(evaluation) == str(without)

    def hidden(lm: nn.Module, deterministic: bool) -> np.ndarray:
        rngs = {"dropout": jax.random.key(0)}
        run = jax.jit(lambda p: lm.apply({"params": p}, tokens, deterministic, method="hidden", rngs=rngs))
        return np.asarray(run(params))

    return float(np.abs(hidden(lm, False) - hidden(plain, True)).max())


def reached_tokens(lm: nn.Module, params: Any, segments: np.ndarray | None) -> list[int]:
    """Tokens whose embeddings influence positions 3 to 6 of the first of two rows, which holds tokens 0 to 7."""

    def second(params: Any) -> jax.Array:
        hidden = lm.apply({"params": params}, np.arange(16).reshape(2, 8), True, Documents(segments), method="hidden")
        return (hidden[0, 3:7] ** 3).sum()

    gradient = jax.jit(jax.grad(second))(params)["tokens"]["embedding"]
    return np.flatnonzero(np.abs(np.asarray(gradient)).sum(axis=1)).tolist()


LAYOUT = build_layout(PartitioningConfig())
# An optimizer that stores the gradients in its state, so that tests see them without the rounding of an update.
KEEPER = optax.chain(optax.trace(0.0), optax.scale(0.0))


def build_step(
    model: Any,
    optimizer: Any = KEEPER,
    microbatches: int = 1,
    *,
    layout: Layout = LAYOUT,
    dtype: str = "float32",
    objective: Any = None,
    schedule: Any = lambda step: 0.5,
    seed: int = 0,
    compute_dtype: str = "float32",
    **more: Any,
) -> MeshFunction:
    """The training step of a model with parameters in `dtype`, for batches of any size."""
    frozen = {TEACHER: Frozen(more["teacher"], dtype)} if "teacher" in more else {}
    _, shardings = state_shardings(model, optimizer, layout, dtype, "averaging" in more, frozen)
    number = defaultdict(lambda: microbatches)
    step = TrainStep(
        model=model,
        objective=objective if isinstance(objective, dict) else {LOSS: Weighted(objective or CrossEntropy())},
        optimizer=optimizer,
        schedule=schedule,
        num_microbatches=number,
        seed=seed,
        compute_dtype=compute_dtype,
        parts=choose_parts(**more),
    )
    return build_train_step(step, layout, shardings)


def new_state(values: Any, optimizer: Any = KEEPER, step: int = 0, averages: bool = False) -> TrainState:
    """A new state for each call, since the step donates it."""
    params = jax.tree.map(jnp.array, values)
    return TrainState(jnp.int32(step), params, optimizer.init(params), new_average(params) if averages else None)


def metrics_and_gradients(model: Any, values: Any, batch: Any, **how: Any) -> tuple[dict[str, float], Any]:
    """Of a step with the optimizer `KEEPER`; `how` are arguments of `build_step`."""
    state, metrics, _ = build_step(model, **how)(new_state(values), batch)
    return {name: float(value) for name, value in metrics.items()}, state.opt_state[0].trace


def loss_and_gradients(model: Any, values: Any, batch: Any, **how: Any) -> tuple[float, Any]:
    metrics, gradients = metrics_and_gradients(model, values, batch, **how)
    return metrics["train/loss"], gradients


def check_microbatches(model: Any, values: Any, batch: Any, numbers: Sequence[int], **how: Any) -> tuple[float, Any]:
    """Check that the numbers of microbatches change neither a metric nor a gradient; return the loss and the gradients
    of one microbatch."""
    metrics, gradients = metrics_and_gradients(model, values, batch, **how)
    loss = metrics["train/loss"]
    for number in numbers:
        other_metrics, other = metrics_and_gradients(model, values, batch, microbatches=number, **how)
        assert abs(other_metrics["train/loss"] - loss) <= 1e-6 * abs(loss), number
        assert other_metrics == pytest.approx(metrics, rel=1e-5), number
        leaves = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(other), strict=True)
        for (path, expected), found in leaves:
            largest = np.abs(expected).max()
            assert largest > 0, path
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest, err_msg=f"{number} {path}")
    return loss, gradients


def operands(function: Any, *arguments: Any) -> list[tuple[str, str]]:
    """The types of the operands of all products that a function computes, also those in its loops."""

    def found(jaxpr: Any) -> list[tuple[str, str]]:
        types = []
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                types.append(tuple(str(operand.aval.dtype) for operand in equation.invars))
            for inner in jaxprs_in_params(equation.params):
                types += found(inner)
        return types

    return found(jax.make_jaxpr(function)(*arguments).jaxpr)


class TwoTokenLM(nn.Module):
    """A language model that predicts from the last two tokens of a document, for tests of what surrounds a model.

    It compiles in a fraction of the time that the models of lmtrain take. Its table has rows of padding.
    """

    hidden_dim: int
    vocab_size: int
    attention: str = "xla"
    has_dropout: bool = False
    forgets: bool = False
    logit_cap: Any = None

    def setup(self) -> None:
        embed = ("embed", self.hidden_dim)
        rows = ("vocab", -(-self.vocab_size // 4) * 4)
        self.tokens = Embed(rows, self.hidden_dim, nn.initializers.normal(0.5), is_head=True)
        self.mix = Linear((embed,), (("mlp", self.hidden_dim),), nn.initializers.normal(0.5))

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        return (self.hidden(tokens_BS, True) @ self.head().T)[..., : self.vocab_size].astype(jnp.float32)

    def hidden(self, tokens_BS: jax.Array, deterministic: bool, documents: Documents = NO_DOCUMENTS) -> jax.Array:
        x = self.tokens(tokens_BS)
        last = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        if documents.segments is not None:
            same = jnp.diff(documents.segments, prepend=documents.segments[:, :1]) == 0
            last = last * same[..., None]
        return x + jnp.tanh(self.mix(x + 2 * last))

    def head(self) -> jax.Array:
        return self.tokens.embedding

    def head_bias(self) -> None:
        return None

    def further_outputs(self, *_: Any) -> dict[str, Any]:
        return {}
