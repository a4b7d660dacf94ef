"""Estimate of a training step's memory per device: exact for the state, approximate for temporary buffers.

Memory peaks in one of these phases; the estimate is the maximum over them.

    backward   gradients, activations saved for the backward pass, one block's activations, gathered weights of 2 blocks
    loss       saved activations, the logits of a chunk and their gradients, the head and its float32 gradient
    update     gradients and the updates that the optimizer computes
    hessian    (Sophia-H) backward and loss twice: values and their tangents

Every phase also holds a copy of the parameters in the compute dtype if that differs from theirs. Saved activations
are counted in the traced program. Of a block's activations that are not saved, a fixed share is in memory at once (the
compiler fuses the rest away), plus its largest array a second time as a gradient. The shares are fitted to the
compilers' figures, which tools/bench/compiled.py prints next to the estimate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.lora.config import LoraConfig
from lmtrain.lora.model import ADAPTERS, BASE, AdaptedModel, adapt
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, with_dtype
from lmtrain.models.registry import build_model
from lmtrain.objectives.logits import rows_at_once
from lmtrain.sharding.axes import ACTIVATION_OF, as_names
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import bytes_per_device
from lmtrain.train.step.state import TrainState, trainable

# Share of a block's recomputed activations that is in memory at once.
_HELD_OF_A_BLOCK = {"gpu": 0.4, "tpu": 0.3, "cpu": 0.4}
# Share of the residuals outside the blocks that the compiler stores instead of recomputing.
_HELD_OUTSIDE = 0.4
# Share of JAX's residuals that the compiler stores in an unrolled stack without gradient checkpointing: it recomputes
# activation functions and norms where that saves memory traffic. In a loop it stores all.
_HELD_UNROLLED = {"gpu": 0.52, "tpu": 0.6, "cpu": 0.52}
# Bytes per logit: the bfloat16 logit and its gradient, plus a small part of both in float32.
_BYTES_OF_A_LOGIT = 5
# Number of blocks whose weights are gathered at once: the current and the next one.
_GATHERED_BLOCKS = 2

# Other small buffers: a share of the rest, up to a size that no program exceeds.
_OTHER_SHARE, _MOST_OTHER = 0.1, 150 * 2**20

# Rows of the batch that is traced: a prime, so that it can be recognized as a factor of array sizes.
_ROWS = 10_007


@dataclass(frozen=True)
class Memory:
    """Bytes per device: `state` is stored throughout, `work` is temporary, in the step's largest `phase`."""

    state: Mapping[str, int]
    work: Mapping[str, int]
    phase: str = "backward"

    @property
    def total(self) -> int:
        return sum(self.state.values()) + sum(self.work.values())


@dataclass(frozen=True)
class _Activations:
    """Bytes per device of activations: saved for the backward pass, recomputed per block, and of the largest array."""

    saved: int
    again: int
    largest: int


def plan_memory(
    config: ModelConfig,
    lora: LoraConfig | None,
    model: LanguageModel,
    layout: Layout,
    state: TrainState,
    shardings: TrainState,
    state_bytes: Mapping[str, int],
    *,
    compute_dtype: str,
    rows: int,
    accumulates: bool,
    inputs: Mapping[str, str],
    optimizer: str = "adam",
    hessian: str | None = None,
    platform: str = "cpu",
) -> Memory:
    """Estimate the step's memory. `rows`: sequences per device at once; `state` is abstract; `inputs`: batch arrays.

    With `lora`, `model` has adapters; gradients are those of the adapters, and weights those of the frozen base.
    """
    params = state.params
    of_params = shardings.parts["params"]
    compute_params = with_dtype(params, compute_dtype)
    gradients = bytes_per_device(with_dtype(params, "float32") if accumulates else compute_params, of_params)
    copy = {}
    if jax.tree.leaves(params)[0].dtype != jnp.dtype(compute_dtype):
        copy["copy of the parameters"] = bytes_per_device(compute_params, of_params)
    weights, of_weights = compute_params, of_params
    if state.base is not None:
        weights, of_weights = with_dtype(state.base, compute_dtype), shardings.base
        if jax.tree.leaves(state.base)[0].dtype != jnp.dtype(compute_dtype):
            copy["copy of the base"] = bytes_per_device(weights, of_weights)
    activations = _activations(config, lora, model, layout, compute_dtype, rows, inputs, platform)
    block = int(_HELD_OF_A_BLOCK[platform] * activations.again) + activations.largest
    gathered = min(_GATHERED_BLOCKS, config.num_layers) * _gathered(weights, of_weights, config.num_layers)
    logits = _logits(config, model, layout, rows, platform)
    head = _head(config, model, layout, compute_dtype, has_gradient=_trains_head(model))
    phases = {
        "backward": {
            **copy,
            "gradients": gradients,
            "gathered weights": gathered,
            "saved activations": activations.saved,
            "one block's activations": block,
        },
        "loss": {**copy, "saved activations": activations.saved, "logits": logits, "head": head}
        | ({"gradients": gradients} if accumulates else {}),
        "update": {"gradients": gradients, "updates": _updates(optimizer, layout, params)},
    }
    if hessian == "hutchinson":
        phases["hessian"] = {
            **copy,
            "gradients": gradients + bytes_per_device(with_dtype(params, "float32"), of_params),
            "gathered weights": 2 * gathered,
            "saved activations": 2 * activations.saved,
            "one block's activations": 2 * block,
            "logits": 2 * logits,
            "head": 2 * head,
        }
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    work = phases[phase]
    other = min(int(_OTHER_SHARE * (sum(state_bytes.values()) + sum(work.values()))), _MOST_OTHER)
    return Memory(state_bytes, {**work, "other buffers": other}, phase)


def largest_arrays(parts: Mapping[str, Any], shardings: Mapping[str, Any], number: int = 4) -> list[tuple[str, int]]:
    """The largest arrays of the state and their bytes per device, such as `params/tokens/embedding`, largest first.

    Adam's two moments of a parameter count as two arrays.
    """
    sizes = jax.tree.map(lambda leaf, sharding: bytes_per_device(leaf, sharding), dict(parts), dict(shardings))
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), size)
        for path, size in jax.tree_util.tree_leaves_with_path(sizes)
    ]
    return sorted(named, key=lambda one: -one[1])[:number]


def _gathered(params: Any, shardings: Any, num_layers: int) -> int:
    """Bytes of one block's weights that FSDP splits, gathered; 0 if nothing is split over `data`."""

    def one(leaf: Any, sharding: Any) -> int:
        names = [name for axes in sharding.spec for name in as_names(axes)]
        if "data" not in names or sharding.mesh.shape["data"] == 1:
            return 0
        model_parts = math.prod(sharding.mesh.shape[name] for name in names if name != "data")
        return leaf.size * leaf.dtype.itemsize // model_parts

    blocks = params.get("blocks", {})
    return sum(jax.tree.leaves(jax.tree.map(one, blocks, shardings.get("blocks", {})))) // num_layers


def _activations(
    config: ModelConfig,
    lora: LoraConfig | None,
    model: LanguageModel,
    layout: Layout,
    dtype: str,
    rows: int,
    inputs: Mapping[str, str],
    platform: str,
) -> _Activations:
    def residuals(layers: int, policy: bool | str) -> _Residuals:
        changed = config.model_copy(update={"num_layers": layers, "gradient_checkpointing": policy})
        attention = getattr(getattr(model, "inner", model), "attention", "xla")
        built = adapt(lora, changed, build_model(changed, model.vocab_size, attention))
        return _residuals(changed, built, layout, dtype, rows, inputs)

    policy = config.gradient_checkpointing
    three, one = residuals(3, False), residuals(1, False)
    largest, of_a_block = one.largest, (three.whole - one.whole) // 2
    if policy is not False:
        three, one = residuals(3, policy), residuals(1, policy)
    kept, kept_whole = (three.split - one.split) // 2, (three.whole - one.whole) // 2
    outside = int(_HELD_OUTSIDE * (one.split - kept))
    if policy is False and not config.scan_layers:
        kept = int(_HELD_UNROLLED[platform] * kept)
    blocks = 1 if policy == "offload" else config.num_layers  # the inputs of the other blocks are in the host's memory
    return _Activations(outside + kept * blocks, max(of_a_block - kept_whole, 0), largest)


class _Residuals(NamedTuple):
    """Bytes per device saved for the backward pass, and bytes of the largest array of a block among them.

    `split` counts the residual stream as split along the sequence where tensor parallelism does that; `whole` counts
    it as gathered, the form that matrix products inside a block need.
    """

    split: int
    whole: int
    largest: int


def _residuals(
    config: ModelConfig, model: LanguageModel, layout: Layout, dtype: str, rows: int, inputs: Mapping[str, str]
) -> _Residuals:
    tokens = jax.ShapeDtypeStruct((_ROWS, config.seq_len), jnp.int32)
    whole = with_dtype(nn.meta.unbox(abstract_params(model)), dtype)
    params = trainable(model, whole)

    def pull_back(params: Any, base: Any, tokens: Any, key: Any) -> Any:
        def hidden(params: Any) -> jax.Array:
            params = params if base is None else {BASE: base, ADAPTERS: params}
            rngs = {"dropout": key} if model.has_dropout else {}
            more = [tokens if name in inputs else None for name in ("segments", "positions")]
            output: jax.Array = model.apply(
                {"params": params}, tokens, not model.has_dropout, *more, method="hidden", rngs=rngs
            )
            return output

        return jax.vjp(hidden, params)[1]

    base = whole[BASE] if isinstance(model, AdaptedModel) else None
    leaves = jax.tree.leaves(jax.eval_shape(pull_back, params, base, tokens, jax.random.key(0)))
    widths = _split_widths(model, layout)
    sequence, stream = layout.num_parts("act_seq"), layout.num_parts("act_stream")
    split, whole = [], []
    for leaf in leaves:
        rows_at = next((dim for dim, size in enumerate(leaf.shape) if size % _ROWS == 0), None)
        if rows_at is not None:
            inner = leaf.shape[rows_at + 1 :]
            parts = next((parts for size, parts in widths.items() if size in inner), 0)
            size = leaf.size * leaf.dtype.itemsize * rows / _ROWS
            whole.append(size / (parts or sequence))
            split.append(size / (parts or stream))
    return _Residuals(int(sum(split)), int(sum(whole)), int(max(whole, default=0)))


def _split_widths(model: LanguageModel, layout: Layout) -> dict[int, int]:
    """Sizes of the dimensions that computation splits (heads, MLP) -> number of parts."""
    boxes = jax.tree.leaves(abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    sizes = {name: size for box in boxes for name, size in zip(box.names, box.value.shape, strict=True)}
    axes = {name: activation for name, activation in ACTIVATION_OF.items() if name in sizes and name != "embed"}
    parts = {sizes[name]: layout.num_parts(activation) for name, activation in axes.items()}
    return {size: number for size, number in parts.items() if number > 1}


def _logits(config: ModelConfig, model: LanguageModel, layout: Layout, rows: int, platform: str) -> int:
    vocab = config.padded(model.vocab_size) // layout.num_parts("act_vocab")
    positions = config.seq_len // (layout.num_parts("act_seq") if vocab == config.padded(model.vocab_size) else 1)
    return _BYTES_OF_A_LOGIT * rows_at_once(rows * positions, vocab, platform) * vocab


def _head(config: ModelConfig, model: LanguageModel, layout: Layout, dtype: str, has_gradient: bool) -> int:
    """Bytes of the gathered head and its float32 gradient."""
    size = config.padded(model.vocab_size) * config.hidden_dim // layout.num_parts("act_vocab")
    return size * (jnp.dtype(dtype).itemsize + (4 if has_gradient else 0))


def _trains_head(model: LanguageModel) -> bool:
    return not isinstance(model, AdaptedModel) or bool(model.in_full)


def _updates(optimizer: str, layout: Layout, params: Any) -> int:
    """Bytes of an optimizer's temporary buffers: Muon needs complete matrices, distributed over the devices."""
    if optimizer != "muon":
        return 0
    stacks = sum(4 * leaf.size for leaf in jax.tree.leaves(params.get("blocks", {})) if len(leaf.shape) > 2)
    return 2 * stacks // (layout.mesh.shape["data"] * layout.mesh.shape["model"])
