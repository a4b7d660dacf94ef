"""One training step, a pure function."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.traverse_util import flatten_dict

from lmtrain.lora.model import BASE
from lmtrain.models.attention.attend import SCORES
from lmtrain.models.interface import LanguageModel, outputs_of
from lmtrain.models.layers.quantized import QUANTIZED
from lmtrain.models.moe.load import BY_LAYER, LOAD, REDUCE, collect_load, load_metrics
from lmtrain.models.params import AUXILIARY, Auxiliary, cast_to_compute, collect, has_auxiliary
from lmtrain.objectives.interface import LossTerms, Objective, further_sums, main_loss, sum_of_weights
from lmtrain.optim.schedules import Schedule
from lmtrain.optim.transforms import widen
from lmtrain.sharding.local import num_parts, split_over
from lmtrain.sharding.mesh import Layout, MeshFunction
from lmtrain.tracking.jit_log import METRICS, collecting
from lmtrain.train.step.hessian import Highest, sum_over_microbatches
from lmtrain.train.step.parts import StepPart, Work
from lmtrain.train.step.state import TrainState

# Part of the name of all operations of the optimizer in a compiled program.
OPTIMIZER_SCOPE = "optimizer_update"

Metrics = dict[str, jax.Array]


class LossSum(struct.PyTreeNode):
    """Sums over a microbatch: the main loss and its logged values, other logged values by name, further losses of the
    objective and auxiliary ones of the model by name, the load of experts by router, and the highest scores of
    attention, [N, H] by the path of its module."""

    main: LossTerms
    logged: Metrics
    further: dict[str, Auxiliary]
    auxiliary: dict[str, Auxiliary]
    load: dict[str, jax.Array]
    scores: dict[str, Highest]

    @property
    def added(self) -> dict[str, Auxiliary]:
        """The losses besides the main one."""
        if taken := self.further.keys() & self.auxiliary.keys():
            raise ValueError(f"{', '.join(sorted(taken))}: a loss of the model and of the objective have the same name")
        return self.further | self.auxiliary

    @property
    def weights(self) -> Metrics:
        """The weights of the added losses, over all layers."""
        return {name: value.weight.sum() for name, value in self.added.items()}

    def with_added(self, scales: Metrics) -> jax.Array:
        """The main loss plus coefficient * scale * total of each added one."""
        parts = (value.coefficient * scales[name] * value.total.sum() for name, value in self.added.items())
        return sum(parts, start=self.main.total)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """What defines a training step: (state, batch, requests) -> (state after one update, metrics, maximum of requests).

    The loss is that of `objective` over the batch and does not depend on the number of microbatches, which
    `num_microbatches` gives for each batch size. `requests` are those of a run's processes, by device; the step returns
    the maximum of each; None for a run of one process (`norms.py`). Dropout is a function of (seed, step, microbatch).
    `train/loss` is its main loss; auxiliary losses of the model are added too (`lmtrain/models/params.py`). Values that
    the model sows or that `jit_log` receives are part of the metrics. `parts` are the optional ones.
    """

    model: LanguageModel
    objective: Objective
    optimizer: optax.GradientTransformation
    schedule: Schedule
    num_microbatches: Mapping[int, int]
    seed: int = 0
    compute_dtype: str = "float32"
    parts: tuple[StepPart, ...] = ()

    def __call__(self, state: TrainState, batch: Any, requests: Any = None) -> tuple[TrainState, Metrics, Any]:
        number = self.num_microbatches[batch["tokens"].shape[0]]
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        params = cast_to_compute(state.params, self.compute_dtype)  # once for all microbatches
        work = Work(self.model, main_loss(self.objective), params, batch, key, number)
        sums, gradients, weights = self._gradients(state, work)
        scale = 1.0 / sum_of_weights(work.loss, batch)
        loss = sums.main.total * scale
        gradients = jax.tree.map(lambda g, p: (widen(g) * scale).astype(p.dtype), gradients, state.params)
        scores = {name: highest.value for name, highest in sums.scores.items()}
        extra = {"loss": loss} | {
            name: value for part in self.parts for name, value in part.arguments(work, scores).items()
        }
        with collecting() as also_logged, jax.named_scope(OPTIMIZER_SCOPE):
            optimizer = optax.with_extra_args_support(self.optimizer)
            updates, moments = optimizer.update(gradients, state.opt_state, state.params, **extra)
        for part in self.parts:
            updates = part.updates(updates, sums.load)
        after = state.replace(step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=moments)
        metrics = {
            "train/loss": loss,
            "train/learning_rate": self.schedule(state.step),
            "train/gradient_norm": optax.tree.norm(gradients),
        }
        metrics |= {f"train/{name}": total * scale for name, total in sums.main.logged.items()}
        if scores:
            metrics["train/highest_score"] = jnp.stack([each.max() for each in scores.values()]).max()
        if (skipped := optax.tree.get(moments, "skipped")) is not None:
            metrics["optim/skipped_steps"] = skipped
        if requests is not None:
            requests = requests.max(axis=0)  # one by one: collectives of GPUs have no bitwise OR
        for part in self.parts:
            after, more = part.after(after, gradients, updates)
            metrics |= more
        logged = {name: total / number for name, total in sums.logged.items()} | also_logged.means
        metrics |= by_layer_of_experts(sums)
        means = {name: value.total.sum() / weights[name] for name, value in sums.added.items()}
        means |= {name: REDUCE[name](v) for name, v in metrics.get(BY_LAYER, {}).items() if name in REDUCE}
        if taken := (metrics.keys() & (logged.keys() | means.keys())) | (logged.keys() & means.keys()):
            raise ValueError(f"jit_log: {', '.join(sorted(taken))}: this name is reserved by lmtrain; use another one")
        return after, metrics | logged | means, requests

    def _gradients(self, state: TrainState, work: Work) -> tuple[LossSum, Any, Metrics]:
        """Sums over the batch, the gradients of the main loss's sum with the added ones, and the weights of these."""
        frozen = cast_to_compute(state.frozen, self.compute_dtype)
        collections: dict[str, Any] = {QUANTIZED: {}}
        for part in self.parts:
            collections |= part.collections(frozen.get(BASE, work.params))
        state = state.replace(frozen=frozen)

        def loss_sum(params: Any, micro: Any, key: jax.Array) -> LossSum:
            return self._loss_sum({"params": state.with_base(params), **collections}, micro, key, state)

        weights: dict[str, jax.Array] = {}
        of_batch = (work.batch, work.key, work.num_microbatches)
        if len(self.objective) > 1 or has_auxiliary(self.model):
            # of this forward pass, the compiler keeps only what the weights depend on: usually the shape of the batch
            weights = sum_over_microbatches(lambda *part: loss_sum(work.params, *part).weights, *of_batch)
            weights = {name: jnp.where(weight > 0, weight, 1.0) for name, weight in weights.items()}
        count = sum_of_weights(work.loss, work.batch)
        scales = {name: count / weight for name, weight in weights.items()}
        for name, further in self.objective.items():
            if f"train/{name}" in scales:
                scales[f"train/{name}"] *= further.coefficient_at(state.step)

        def value_and_grad(micro: Any, key: jax.Array) -> Any:
            def loss(params: Any) -> tuple[jax.Array, LossSum]:
                sums = loss_sum(params, micro, key)
                return sums.with_added(scales), sums

            (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(work.params)
            return sums, gradients

        return *sum_over_microbatches(value_and_grad, *of_batch), weights

    def _loss_sum(self, variables: Any, batch: Any, key: jax.Array, state: TrainState) -> LossSum:
        """The loss of a batch, without the logits of the entire batch."""
        drops = self.model.has_dropout
        how = {"method": outputs_of, "rngs": {"dropout": key} if drops else {}, "mutable": self._sown}
        with collecting() as logged:
            outputs, sown = self.model.apply(variables, batch, not drops, **how)
            logged.add_sown(sown)
            for part in self.parts:
                batch = batch | part.inputs(state, batch)
            main = main_loss(self.objective).loss_sum(outputs, batch)
            further = further_sums(self.objective, outputs, batch)
        scores = {"/".join(path[:-1]): Highest(value[0]) for path, value in flatten_dict(sown.get(SCORES, {})).items()}
        return LossSum(main, logged.means, further, collect(sown), collect_load(sown), scores)

    @property
    def _sown(self) -> list[str]:
        return [METRICS, AUXILIARY, LOAD, *(name for part in self.parts for name in part.sown)]


def by_layer_of_experts(sums: LossSum) -> dict[str, Any]:
    """Metrics of a mixture of experts by layer, under one name; none without one."""
    if not sums.load:
        return {}
    by_layer = load_metrics(sums.load, num_parts(split_over("expert")))
    by_layer |= {name: value.total / jnp.maximum(value.weight, 1) for name, value in sums.auxiliary.items()}
    return {BY_LAYER: by_layer}


def build_train_step(
    define: TrainStep, layout: Layout, shardings: TrainState, options: Mapping[str, Any] | None = None
) -> MeshFunction:
    """The jitted step, compiled once for each size of batch. The state is donated; `options` are compiler options."""

    def step(state: TrainState, batch: Any, requests: Any = None) -> tuple[TrainState, Metrics, Any]:
        return define(state, batch, requests)

    out = (shardings, layout.replicated, layout.replicated)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=dict(options or {}))
    return MeshFunction(layout, jitted)
