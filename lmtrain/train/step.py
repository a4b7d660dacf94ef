"""One training step: a pure function, compiled once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lmtrain.models.interface import LanguageModel
from lmtrain.optim.schedules import Schedule
from lmtrain.sharding.mesh import Layout
from lmtrain.train.loss import next_token_targets, summed_cross_entropy
from lmtrain.train.state import TrainState, without_kernels

Metrics = dict[str, jax.Array]


def build_train_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    layout: Layout,
    shardings: Any,
    *,
    seed: int,
    compute_dtype: str,
    num_microbatches: int,
    dropout: bool,
    z_loss_weight: float = 0.0,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The jitted step: (state, batch) -> (state after one update, metrics on the device). The state is donated.

    The loss is the mean over all target tokens of the batch, whatever the number of microbatches. Dropout is a function
    of (seed, step, microbatch).
    """

    def loss_sum(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return _loss_sum(model, params, batch, not dropout, {"dropout": key} if dropout else {}, z_loss_weight)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        count = batch["loss_mask"].sum().astype(jnp.float32)
        compute_params = _cast(state.params, compute_dtype)  # once for all microbatches
        loss, gradients = _accumulate(jax.value_and_grad(loss_sum), compute_params, batch, key, num_microbatches)
        scale = 1.0 / jnp.maximum(count, 1.0)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype) * scale.astype(p.dtype), gradients, state.params)
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        metrics = {
            "train/loss": loss * scale,
            "train/learning_rate": schedule(state.step),
            "train/gradient_norm": optax.tree.norm(gradients),
        }
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments), metrics

    return _within(layout, jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated)))


def build_eval_step(model: LanguageModel, layout: Layout, compute_dtype: str) -> Callable[[Any, Any], Any]:
    """The jitted (params, batch) -> (summed loss, number of targets), without dropout."""

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return _loss_sum(model, _cast(params, compute_dtype), batch, True, {}), batch["loss_mask"].sum()

    return _within(layout, jax.jit(evaluate, out_shardings=layout.replicated))


def build_logits(model: LanguageModel, params: Any, layout: Layout) -> Callable[[Any], Any]:
    """tokens [B, S] -> float32 logits [B, S, V], on the host."""
    model = without_kernels(model)
    function = _within(
        layout, jax.jit(lambda tokens: model.apply({"params": params}, tokens), out_shardings=layout.replicated)
    )
    return lambda tokens: jax.device_get(function(tokens))


def _loss_sum(
    model: LanguageModel, params: Any, batch: Any, deterministic: bool, rngs: Any, z_loss_weight: float = 0.0
) -> jax.Array:
    """Cross entropy summed over the targets of a batch; documents are kept apart if it has `segments`."""
    variables = {"params": params}
    apply = model.apply
    hidden = apply(variables, batch["tokens"], deterministic, batch.get("segments"), method="hidden", rngs=rngs)
    head = apply(variables, method="head")
    targets = next_token_targets(batch["tokens"])
    return summed_cross_entropy(hidden, head, targets, batch["loss_mask"], model.vocab_size, z_loss_weight)


def _within(layout: Layout, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with layout.active():
            return function(*arguments)

    return call


def _accumulate(value_and_grad: Any, params: Any, batch: Any, key: jax.Array, num_microbatches: int) -> tuple[Any, Any]:
    """Sums of loss and gradients over microbatches, one after the other."""
    if num_microbatches == 1:
        return value_and_grad(params, batch, jax.random.fold_in(key, 0))
    # microbatch i takes rows i, i + n, ...: each then spans all devices, where halves of the batch would not
    split = jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def one(sums: Any, indexed: Any) -> tuple[Any, None]:
        index, micro = indexed
        loss, gradients = value_and_grad(params, micro, jax.random.fold_in(key, index))
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), sums, (loss, gradients)), None

    zeros = (jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    sums, _ = jax.lax.scan(one, zeros, (jnp.arange(num_microbatches), split))
    return sums


def _cast(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda p: p.astype(dtype), params)
