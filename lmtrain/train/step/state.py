"""The training state: parameters, optimizer state, their average, frozen models, and the number of updates done."""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding

from lmtrain.lora.model import ADAPTERS, BASE, trainable
from lmtrain.models.interface import LanguageModel
from lmtrain.models.layers.quantized import KERNEL
from lmtrain.models.params import (
    abstract_params,
    cast,
    flatten,
    initializer,
    parameter_axes,
    storage_spec,
    stored,
    unflatten,
    with_dtype,
)
from lmtrain.run.trainer import EmaConfig, EmaDecaySqrtConfig
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import bytes_per_device, like_parameters, parameter_shardings
from lmtrain.weights.load_checkpoint import new_params

# The number of updates done -> the weight of the current parameters in the average.
Averaging = Callable[[jax.Array], jax.Array]


def build_averaging(config: EmaConfig | EmaDecaySqrtConfig | None) -> Averaging | None:
    """average = (1 - a) average + a parameters, after each update, starting from the initial parameters.

    ema             a = 1 - beta
    ema_decay_sqrt  the same up to `switch_step`, then a = max(1 - sqrt(t / decay_steps), epsilon), t steps after the
                    switch: the average starts at the parameters of that step and moves less and less
    """
    if config is None:
        return None
    if isinstance(config, EmaConfig):
        return lambda step: jnp.float32(1 - config.beta)
    after = config

    def share(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - after.switch_step) / after.decay_steps, 0.0, 1.0)
        return jnp.maximum(jnp.where(step < after.switch_step, 1 - after.beta, 1 - jnp.sqrt(progress)), after.epsilon)

    return share


def move_average(average: Any, params: Any, share: jax.Array) -> Any:
    """average + share * (params - average) for each leaf, of a float32 average."""
    return jax.tree.map(lambda old, new: old + share * (new.astype(jnp.float32) - old), average, params)


def new_average(params: Any) -> Any:
    """A copy of the parameters in float32, whatever their dtype: bfloat16 would round away what an update moves."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)


class Frozen(NamedTuple):
    """A model of a run that is not trained. Its parameters have `dtype`, and the matrices of its blocks the format
    `storage` of 8 or 4 bits, if any."""

    model: LanguageModel
    dtype: str
    storage: str | None = None

    def placed(self, layout: Layout) -> tuple[Any, Any]:
        """The abstract parameters, and the sharding of each."""
        boxed = abstract_params(self.model)
        abstract = jax.eval_shape(self._as_stored, nn.meta.unbox(boxed))
        shardings, axes = flatten(parameter_shardings(layout, boxed)), flatten(parameter_axes(self.model))
        placed = {}
        for path, leaf in flatten(abstract).items():
            if path in shardings:
                placed[path] = shardings[path]
                continue
            kernel = f"{path.rpartition('/')[0]}/{KERNEL}"
            spec = storage_spec(leaf.shape, shardings[kernel].spec, axes[kernel], layout.mesh.shape)
            placed[path] = NamedSharding(layout.mesh, spec)
        return abstract, unflatten(placed)

    def new(self, key: jax.Array) -> Any:
        """New parameters. Compile the call: it computes all values."""
        return self._as_stored(nn.meta.unbox(initializer(self.model)(key)))

    def _as_stored(self, params: Any) -> Any:
        return stored(cast(params, self.dtype), self.storage, parameter_axes(self.model))


# Name of the frozen teacher of a distillation; that of the base of adapters is `BASE`.
TEACHER = "teacher"

# Fields of the state -> parts of a checkpoint, whose names never change.
ON_DISK = {"params": "params", "opt_state": "optimizer", "ema_params": "average"}


class TrainState(struct.PyTreeNode):
    """Training state. `step`: int32 scalar; the others: trees of arrays. `ema_params` is float32, None without model
    averaging.

    `frozen` has the parameters of other models by name (`BASE`, `TEACHER`), which no checkpoint has. With LoRA,
    `params` are the adapters.
    """

    step: Any
    params: Any
    opt_state: Any
    ema_params: Any = None
    frozen: dict[str, Any] = field(default_factory=dict)

    def with_base(self, params: Any) -> Any:
        """The parameters of the model: `params`, with LoRA together with the base."""
        return {BASE: self.frozen[BASE], ADAPTERS: params} if BASE in self.frozen else params

    @property
    def best_params(self) -> Any:
        """The parameters to export: the average if there is one."""
        return self.with_base(self.params if self.ema_params is None else self.ema_params)

    @property
    def parts(self) -> dict[str, Any]:
        """Parts of a checkpoint, besides the step, by their names in it (`ON_DISK`); no `average` without averaging."""
        return {name: part for field, name in ON_DISK.items() if (part := getattr(self, field)) is not None}

    @property
    def in_memory(self) -> dict[str, Any]:
        """`parts`, and the frozen models."""
        return self.parts | self.frozen

    @classmethod
    def from_parts(cls, step: Any, parts: Mapping[str, Any]) -> "TrainState":
        """The inverse of `parts`."""
        return cls(step, **{field: parts[name] for field, name in ON_DISK.items() if name in parts})


def state_bytes(abstract: TrainState, shardings: TrainState) -> dict[str, int]:
    """Bytes per device of each part of the state."""
    parts = shardings.in_memory
    return {name: bytes_per_device(part, parts[name]) for name, part in abstract.in_memory.items()}


def state_shardings(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    dtype: str,
    averages: bool = False,
    frozen: Mapping[str, Frozen] | None = None,
) -> tuple[TrainState, TrainState]:
    """The abstract `TrainState` of a model with parameters in `dtype` and of frozen ones by name; and the sharding of
    each of its leaves."""
    boxed = abstract_params(model)
    params = with_dtype(trainable(model, nn.meta.unbox(boxed)), dtype)
    shardings = trainable(model, parameter_shardings(layout, boxed))
    moments = jax.eval_shape(optimizer.init, params)
    average = jax.eval_shape(new_average, params) if averages else None
    others = {name: each.placed(layout) for name, each in (frozen or {}).items()}
    abstract = TrainState(
        jax.ShapeDtypeStruct((), jnp.int32), params, moments, average, {name: one for name, (one, _) in others.items()}
    )
    return abstract, TrainState(
        layout.replicated,
        shardings,
        like_parameters(layout, moments, params, shardings),
        shardings if averages else None,
        {name: placed for name, (_, placed) in others.items()},
    )


# Number of the key of `initial`, among those of a run's seed.
_INITIAL = 2


def init_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    shardings: TrainState,
    *,
    seed: int,
    initial: Callable[[jax.Array, Any], Any] = lambda key, params: params,
    factors: Mapping[str, Any] | None = None,
    frozen: Mapping[str, Frozen] | None = None,
    given: Mapping[str, Any] | None = None,
) -> TrainState:
    """An initial state, each array computed on its devices. The same seed gives the same values on any mesh.

    `given` are parameters of `frozen` models by name; those of the others are initialized too. `initial` changes new
    parameters, with a key; then, with `factors` of the transfer between sizes, they are multiplied by their `initial`,
    and `offset` is added.
    """
    given = dict(given or {})
    rest = {name: each for name, each in (frozen or {}).items() if name not in given}

    def init(key: jax.Array, given: Mapping[str, Any]) -> TrainState:
        new = {name: each.new(key) for name, each in rest.items()}
        params = new_params(model, key, abstract.params, {**given, **new}.get(BASE))
        params = initial(jax.random.fold_in(key, _INITIAL), params)
        if factors is not None:
            params = jax.tree.map(_scaled, params, factors["initial"], factors["offset"])
        ema_params = None if abstract.ema_params is None else new_average(params)
        return TrainState(jnp.int32(0), params, optimizer.init(params), ema_params, new)

    out = shardings.replace(frozen={name: shardings.frozen[name] for name in rest})
    state: TrainState = jax.jit(init, out_shardings=out)(jax.random.key(seed), given)
    return state.replace(frozen=given | state.frozen)


def _scaled(values: jax.Array, factor: Any, offset: float) -> jax.Array:
    return values * jnp.asarray(factor, values.dtype) + jnp.asarray(offset, values.dtype)
