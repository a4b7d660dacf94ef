"""One training step: a pure function, compiled once for each size of batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from lmtrain.models.interface import LanguageModel, hidden_and_head
from lmtrain.models.params import cast, without_kernels
from lmtrain.objectives.interface import Objective, sum_of_weights
from lmtrain.optim.schedules import Schedule
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.within import Within
from lmtrain.tracking.jit_log import METRICS, Collected, collecting
from lmtrain.train.step.ema import Averaging, move_average
from lmtrain.train.step.hessian import estimate_hessian
from lmtrain.train.step.microbatches import sum_over_microbatches
from lmtrain.train.step.norms import Watch
from lmtrain.train.step.state import TrainState

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
    num_microbatches: Mapping[int, int],
    dropout: bool,
    objective: Objective,
    hessian: str | None = None,
    averaging: Averaging | None = None,
    watch: Watch | None = None,
    options: Mapping[str, Any] | None = None,
) -> Within:
    """The jitted step: (state, batch, requests) -> (state after one update, metrics, maximum of requests), on device.

    The loss is the mean of `objective` over the batch and does not depend on the number of microbatches, which
    `num_microbatches` gives for each batch size. The state is donated. `requests` are those of a run's processes, by
    device; the step returns the maximum of each; None for a run of one process (`agreement.py`). Dropout is a
    function of (seed, step, microbatch). Values that the model sows or that `jit_log` receives are part of the metrics.
    `options` are compiler options.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def loss_sum(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Metrics]:
        with collecting() as logged:
            rngs = {"dropout": key} if dropout else {}
            loss = _loss_sum(model, objective, params, batch, not dropout, rngs, logged)
        return loss, logged.means

    def step(state: TrainState, batch: Any, requests: Any = None) -> tuple[TrainState, Metrics, Any]:
        parts = num_microbatches[batch["tokens"].shape[0]]
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        scale = 1.0 / sum_of_weights(objective, batch)
        compute_params = cast(state.params, compute_dtype)  # once for all microbatches
        compute_base = None if state.base is None else cast(state.base, compute_dtype)

        def value_and_grad(micro: Any, key: jax.Array) -> Any:
            def loss(params: Any) -> tuple[jax.Array, Metrics]:
                return loss_sum(state.replace(base=compute_base).whole(params), micro, key)

            return jax.value_and_grad(loss, has_aux=True)(compute_params)

        (loss, logged), gradients = sum_over_microbatches(value_and_grad, batch, key, parts)
        loss = loss * scale
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype) * scale.astype(p.dtype), gradients, state.params)
        extra: dict[str, Any] = {"loss": loss}
        if hessian is not None:
            extra["hessian"] = lambda key: estimate_hessian(
                hessian, model, objective, compute_params, batch, key, parts
            )
        with collecting() as also_logged:
            updates, moments = optimizer.update(gradients, state.opt_state, state.params, **extra)
        params = optax.apply_updates(state.params, updates)
        ema_params = state.ema_params
        if averaging is not None:
            ema_params = move_average(ema_params, params, averaging(state.step + 1))
        metrics = {
            "train/loss": loss,
            "train/learning_rate": schedule(state.step),
            "train/gradient_norm": optax.tree.norm(gradients),
        }
        if (skipped := optax.tree.get(moments, "skipped")) is not None:
            metrics["optim/skipped_steps"] = skipped
        if requests is not None:
            requests = requests.max(axis=0)  # one by one: collectives of GPUs have no bitwise OR
        if watch is not None:
            metrics |= watch.on_device(state.step + 1, {"grads": gradients, "params": params, "updates": updates})
        logged = {name: total / parts for name, total in logged.items()} | also_logged.means
        if taken := metrics.keys() & logged.keys():
            raise ValueError(f"jit_log: {', '.join(sorted(taken))}: this name is reserved by lmtrain; use another one")
        metrics |= logged
        return TrainState(state.step + 1, params, moments, ema_params, state.base), metrics, requests

    out = (shardings, layout.replicated, layout.replicated)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=dict(options or {}))
    return Within(layout, jitted)


def build_logits(model: LanguageModel, params: Any, layout: Layout) -> Callable[[Any], Any]:
    """tokens [B, S] -> float32 logits [B, S, V], on the host."""
    model = without_kernels(model)
    function = Within(
        layout, jax.jit(lambda tokens: model.apply({"params": params}, tokens), out_shardings=layout.replicated)
    )
    return lambda tokens: jax.device_get(function(tokens))


def _loss_sum(
    model: LanguageModel,
    objective: Objective,
    params: Any,
    batch: Any,
    deterministic: bool,
    rngs: Any,
    logged: Collected,
) -> jax.Array:
    """The objective summed over a batch, without the logits of the entire batch; sown values are added to `logged`."""
    how = {"method": hidden_and_head, "rngs": rngs, "mutable": [METRICS]}
    (hidden, head), sown = model.apply({"params": params}, batch, deterministic, **how)
    logged.add_sown(sown)
    return objective.loss_sum(hidden, head, batch, model.vocab_size)
