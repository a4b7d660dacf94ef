"""The training state: parameters, optimizer state, their average, and the number of updates done."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from lmtrain.lora.model import ADAPTERS, BASE, AdaptedModel, trainable
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, flatten, stored, unflatten, with_dtype
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


# Fields of the state -> parts of a checkpoint, whose names never change.
TEACHER = "teacher"
ON_DISK = {"params": "params", "opt_state": "optimizer", "ema_params": "average"}


class TrainState(struct.PyTreeNode):
    """Training state. `step`: int32 scalar; the others: trees of arrays. `ema_params` is float32, None without model
    averaging.

    With LoRA, `params` are the adapters, and `base` the parameters of the frozen model; `teacher` are those of the
    frozen teacher of a distillation. No checkpoint has either.
    """

    step: Any
    params: Any
    opt_state: Any
    ema_params: Any = None
    base: Any = None
    teacher: Any = None

    def with_base(self, params: Any) -> Any:
        """The parameters of the model: `params`, with LoRA together with the base."""
        return params if self.base is None else {BASE: self.base, ADAPTERS: params}

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
        """`parts`, and the frozen base and teacher, if any."""
        frozen = {BASE: self.base, TEACHER: self.teacher}
        return self.parts | {name: part for name, part in frozen.items() if part is not None}

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
    base_dtype: str | None = None,
    base_storage: str | None = None,
) -> tuple[TrainState, TrainState]:
    """The abstract `TrainState` of a model with parameters in `dtype`, and the sharding of each of its leaves.

    With LoRA, the base has `base_dtype`, and its blocks' matrices the 8-bit format `base_storage`, if any.
    """
    boxed = abstract_params(model)
    abstract, placed = nn.meta.unbox(boxed), parameter_shardings(layout, boxed)
    base, base_shardings = None, None
    if isinstance(model, AdaptedModel):
        base = with_dtype(abstract[BASE], base_dtype or dtype)
        base = jax.eval_shape(functools.partial(stored, storage=base_storage), base)
        shardings_by_path = flatten(placed[BASE])
        base_shardings = unflatten({path: shardings_by_path.get(path, layout.replicated) for path in flatten(base)})
    params, shardings = with_dtype(trainable(model, abstract), dtype), trainable(model, placed)
    moments = jax.eval_shape(optimizer.init, params)
    average = jax.eval_shape(new_average, params) if averages else None
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, moments, average, base)
    moment_shardings = like_parameters(layout, moments, params, shardings)
    return state, TrainState(
        layout.replicated, shardings, moment_shardings, shardings if averages else None, base_shardings
    )


def add_teacher(
    abstract: TrainState, shardings: TrainState, teacher: LanguageModel, layout: Layout, dtype: str
) -> tuple[TrainState, TrainState]:
    """Add the parameters of a teacher in `dtype`."""
    boxed = abstract_params(teacher)
    placed = parameter_shardings(layout, boxed)
    return abstract.replace(teacher=with_dtype(nn.meta.unbox(boxed), dtype)), shardings.replace(teacher=placed)


def init_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    shardings: TrainState,
    *,
    seed: int,
    base: Any = None,
    factors: Mapping[str, Any] | None = None,
    teacher: LanguageModel | None = None,
    teacher_params: Any = None,
) -> TrainState:
    """An initial state, each array computed on its devices. The same seed gives the same values on any mesh.

    With LoRA, `base` are the frozen parameters; without it they are initialized too, and so is a `teacher` without
    `teacher_params`. `factors` of the transfer between sizes, if any: new parameters are multiplied by `initial`, and
    `offset` is added.
    """
    new_teacher = teacher if teacher_params is None else None

    def init(key: jax.Array, base: Any) -> TrainState:
        params, frozen = new_params(model, key, abstract.params, abstract.base, base)
        if factors is not None:
            params = jax.tree.map(_scaled, params, factors["initial"], factors["offset"])
        ema_params = None if abstract.ema_params is None else new_average(params)
        taught = None if new_teacher is None else new_params(new_teacher, key, abstract.teacher)[0]
        return TrainState(jnp.int32(0), params, optimizer.init(params), ema_params, frozen, taught)

    given = {name: value for name, value in (("base", base), ("teacher", teacher_params)) if value is not None}
    out = shardings.replace(**dict.fromkeys(given))
    state: TrainState = jax.jit(init, out_shardings=out)(jax.random.key(seed), base)
    return state.replace(**given)


def _scaled(values: jax.Array, factor: Any, offset: float) -> jax.Array:
    return values * jnp.asarray(factor, values.dtype) + jnp.asarray(offset, values.dtype)
