"""One training step: a pure function, compiled once for each size of batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lmtrain.models.interface import LanguageModel, hidden_and_head
from lmtrain.objectives.cross_entropy import CrossEntropy, next_token_targets
from lmtrain.objectives.interface import Objective, sum_of_weights
from lmtrain.optim.schedules import Schedule
from lmtrain.sharding.mesh import Layout
from lmtrain.tracking.jit_log import METRICS, Collected, collecting
from lmtrain.train.step.agreement import WISHES
from lmtrain.train.step.ema import Averaging, move_average
from lmtrain.train.step.hessian import estimate_hessian
from lmtrain.train.step.microbatches import sum_over_microbatches
from lmtrain.train.step.norms import Watch
from lmtrain.train.step.state import TrainState, without_kernels

Metrics = dict[str, jax.Array]

# What evaluation measures, whatever training minimizes.
_PLAIN = CrossEntropy()


@dataclass(frozen=True)
class Within:
    """A jitted function, called and lowered with the mesh and the compute mapping of `layout`."""

    layout: Layout
    jitted: Any

    def __call__(self, *arguments: Any) -> Any:
        with self.layout.active():
            return self.jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        with self.layout.active():
            return self.jitted.lower(*arguments)


def build_train_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    layout: Layout,
    shardings: Any,
    *,
    seed: int,
    compute_dtype: str,
    num_microbatches: Mapping[int, int],
    dropout: bool,
    objective: Objective = _PLAIN,
    hessian: str | None = None,
    averaging: Averaging | None = None,
    watch: Watch | None = None,
    options: Mapping[str, Any] | None = None,
) -> Within:
    """The jitted step: (state, batch) -> (state after one update, metrics on the device). The state is donated.

    The loss is the mean of `objective` over the batch, whatever the number of microbatches, which `num_microbatches`
    gives for each size of batch. Dropout is a function of (seed, step, microbatch). What the model
    sows and what `jit_log` is given comes out with the metrics. `options` are the compiler's.
    """

    optimizer = optax.with_extra_args_support(optimizer)

    def loss_sum(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Metrics]:
        with collecting() as logged:
            rngs = {"dropout": key} if dropout else {}
            loss = _loss_sum(model, objective, params, batch, not dropout, rngs, logged)
        return loss, logged.means

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        wishes = batch.get(WISHES)
        batch = {name: value for name, value in batch.items() if name != WISHES}
        parts = num_microbatches[batch["tokens"].shape[0]]
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        scale = 1.0 / sum_of_weights(objective, batch)
        compute_params = cast(state.params, compute_dtype)  # once for all microbatches

        def value_and_grad(micro: Any, key: jax.Array) -> Any:
            return jax.value_and_grad(loss_sum, has_aux=True)(compute_params, micro, key)

        (loss, logged), gradients = sum_over_microbatches(value_and_grad, batch, key, parts)
        loss = loss * scale
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype) * scale.astype(p.dtype), gradients, state.params)
        extra: dict[str, Any] = {"loss": loss}
        if hessian is not None:
            extra["hessian"] = lambda key: estimate_hessian(
                hessian, model, objective, compute_params, batch, key, parts
            )
        with collecting() as also_logged:
            updates, moments = optimizer.update(gradients, state.optimizer, state.params, **extra)
        params = optax.apply_updates(state.params, updates)
        average = state.average
        if averaging is not None:
            average = move_average(average, params, averaging(state.step + 1))
        metrics = {
            "train/loss": loss,
            "train/learning_rate": schedule(state.step),
            "train/gradient_norm": optax.tree.norm(gradients),
        }
        if (skipped := optax.tree.get(moments, "skipped")) is not None:
            metrics["optim/skipped_steps"] = skipped
        if wishes is not None:
            metrics[WISHES] = wishes.max(axis=0)  # one by one: collectives of GPUs have no bitwise OR
        if watch is not None:
            metrics |= watch.on_device(state.step + 1, {"grads": gradients, "params": params, "updates": updates})
        logged = {name: total / parts for name, total in logged.items()} | also_logged.means
        if taken := metrics.keys() & logged.keys():
            raise ValueError(f"jit_log: {', '.join(sorted(taken))}: lmtrain itself logs this; take another name")
        metrics |= logged
        return TrainState(state.step + 1, params, moments, average), metrics

    out = (shardings, layout.replicated)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=dict(options or {}))
    return Within(layout, jitted)


def build_logits(model: LanguageModel, params: Any, layout: Layout) -> Callable[[Any], Any]:
    """tokens [B, S] -> float32 logits [B, S, V], on the host."""
    model = without_kernels(model)
    function = Within(
        layout, jax.jit(lambda tokens: model.apply({"params": params}, tokens), out_shardings=layout.replicated)
    )
    return lambda tokens: jax.device_get(function(tokens))


def build_eval_step(
    model: LanguageModel,
    layout: Layout,
    compute_dtype: str,
    token_bytes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Within:
    """The jitted (params, batch) -> (summed loss, targets, bytes of their text), without dropout.

    `token_bytes` [V] are the lengths of the tokens' texts; without it the last is 0.
    """

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        mask = batch["loss_mask"]
        lengths = jnp.int32(0)
        if token_bytes is not None:
            lengths = jnp.where(mask, jnp.asarray(token_bytes)[next_token_targets(batch["tokens"])], 0).sum()
        return _loss_sum(model, _PLAIN, cast(params, compute_dtype), batch, True, {}), mask.sum(), lengths

    jitted = jax.jit(evaluate, out_shardings=layout.replicated, compiler_options=dict(options or {}))
    return Within(layout, jitted)


def _loss_sum(
    model: LanguageModel,
    objective: Objective,
    params: Any,
    batch: Any,
    deterministic: bool,
    rngs: Any,
    logged: Collected | None = None,
) -> jax.Array:
    """The objective summed over a batch; documents are kept apart if it has `segments`."""
    variables = {"params": params}
    how = {"method": hidden_and_head, "rngs": rngs}
    if logged is None:
        hidden, head = model.apply(variables, batch, deterministic, **how)
    else:
        (hidden, head), sown = model.apply(variables, batch, deterministic, **how, mutable=[METRICS])
        logged.add_sown(sown)
    return objective.loss_sum(hidden, head, batch, model.vocab_size)


def cast(params: Any, dtype: str) -> Any:
    """Every leaf in `dtype`."""
    return jax.tree.map(lambda p: p.astype(dtype), params)
