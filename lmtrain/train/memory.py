"""How much memory a training step takes on each device: exactly what lies there, roughly what comes and goes.

The estimate is
    gradients    as the parameters lie: in the computation's type, with accumulation in float32
    copy         of the parameters in the computation's type, where that is another one
    gathered     the largest block's weights whole (FSDP), twice: one is used while the next one comes
    saved        what autodiff keeps between forward and backward pass, counted in the traced program
    block        0.6 of what a block would keep that is computed again: the compiler fuses the rest away
    logits       of a chunk of the loss, three times: logits, probabilities, gradient; and the head's gradient
of one microbatch. On the CPU backend the total was 0.74 to 1.10 of XLA's own figure for eight compiled steps
(tools/bench/memory_plan.py); a GPU's allocator and its kernels' work space want another tenth.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.registry import build_model
from lmtrain.sharding.axes import ACTIVATION_OF
from lmtrain.sharding.mesh import Layout
from lmtrain.train.loss import logits_held
from lmtrain.train.state import TrainState, abstract_params, with_dtype

# Of the values of a block that is computed again, the share that is in memory at once: measured, see above.
_HELD_OF_A_BLOCK = 0.6

# A batch of so many rows is traced: a size that no other dimension is likely to have.
_ROWS = 13


@dataclass(frozen=True)
class Memory:
    """Bytes on each device: `state` lies there all the time, `work` comes and goes within a step; both by name."""

    state: Mapping[str, int]
    work: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.state.values()) + sum(self.work.values())


def plan_memory(
    config: ModelConfig,
    model: LanguageModel,
    layout: Layout,
    state: TrainState,
    shardings: TrainState,
    state_bytes: Mapping[str, int],
    *,
    compute_dtype: str,
    rows: int,
    accumulates: bool,
    separate_documents: bool,
) -> Memory:
    """`rows` are the sequences that a device computes at once; `state` is abstract."""
    params = state.params
    of_params = shardings.parts["params"]
    compute_params = with_dtype(params, compute_dtype)
    gradients = with_dtype(params, "float32") if accumulates else compute_params
    work = {"gradients": bytes_per_device(gradients, of_params)}
    if jax.tree.leaves(params)[0].dtype != jnp.dtype(compute_dtype):
        work["copy of the parameters"] = bytes_per_device(compute_params, of_params)
    work["gathered weights"] = 2 * _gathered(compute_params, of_params, config.num_layers)
    saved, block = _activations(config, model, layout, compute_dtype, rows, separate_documents)
    work["saved activations"] = saved
    work["one block's activations"] = block
    work["logits"] = _logits(config, model, layout, rows)
    return Memory(state_bytes, work)


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """What a tree of (abstract) arrays takes on one device."""
    parts = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize, tree, shardings
    )
    return sum(jax.tree.leaves(parts))


def largest_arrays(parts: Mapping[str, Any], shardings: Mapping[str, Any], number: int = 4) -> list[tuple[str, int]]:
    """The arrays of the state that take most of one device: `params/tokens/embedding` and its bytes, the largest first.

    Adam's two moments of a parameter are two arrays.
    """
    sizes = jax.tree.map(lambda leaf, sharding: bytes_per_device(leaf, sharding), dict(parts), dict(shardings))
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), size)
        for path, size in jax.tree_util.tree_leaves_with_path(sizes)
    ]
    return sorted(named, key=lambda one: -one[1])[:number]


def _gathered(params: Any, shardings: Any, num_layers: int) -> int:
    """Of the stacked blocks one, with what FSDP splits put together; 0 where nothing is split over `data`."""

    def one(leaf: Any, sharding: Any) -> int:
        names = [name for axes in sharding.spec for name in ((axes,) if isinstance(axes, str) else axes or ())]
        if "data" not in names or sharding.mesh.shape["data"] == 1:
            return 0
        model_parts = math.prod(sharding.mesh.shape[name] for name in names if name != "data")
        return leaf.size * leaf.dtype.itemsize // model_parts

    blocks = params.get("blocks", {})
    return sum(jax.tree.leaves(jax.tree.map(one, blocks, shardings.get("blocks", {})))) // num_layers


def _activations(
    config: ModelConfig, model: LanguageModel, layout: Layout, dtype: str, rows: int, separate_documents: bool
) -> tuple[int, int]:
    """Bytes saved for the backward pass, and what a block takes that is computed again."""
    saved = _saved(config, model, layout, dtype, rows, separate_documents)
    if config.gradient_checkpointing is False:
        return saved, saved // config.num_layers
    # beyond what the policy keeps, one block has everything at a time
    single = config.model_copy(update={"num_layers": 1, "gradient_checkpointing": False})
    one = build_model(single, model.vocab_size, getattr(model, "attention", "xla"))
    return saved, int(_HELD_OF_A_BLOCK * _saved(single, one, layout, dtype, rows, separate_documents))


def _saved(
    config: ModelConfig, model: LanguageModel, layout: Layout, dtype: str, rows: int, separate_documents: bool
) -> int:
    tokens = jax.ShapeDtypeStruct((_ROWS, config.seq_len), jnp.int32)
    params = with_dtype(nn.meta.unbox(abstract_params(model)), dtype)

    def pull_back(params: Any, tokens: Any, key: Any) -> Any:
        def hidden(params: Any) -> jax.Array:
            rngs = {"dropout": key} if model.has_dropout else {}
            segments = tokens if separate_documents else None
            variables = {"params": params}
            output: jax.Array = model.apply(
                variables, tokens, not model.has_dropout, segments, method="hidden", rngs=rngs
            )
            return output

        return jax.vjp(hidden, params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pull_back, params, tokens, jax.random.key(0)))
    widths = _split_widths(model, layout)
    total = 0.0
    for leaf in leaves:
        if _ROWS in leaf.shape:
            inner = leaf.shape[leaf.shape.index(_ROWS) + 1 :]
            parts = next((parts for size, parts in widths.items() if size in inner), 1)
            total += leaf.size * leaf.dtype.itemsize / parts
    return int(total * rows / _ROWS)


def _split_widths(model: LanguageModel, layout: Layout) -> dict[int, int]:
    """Sizes of the dimensions that computation splits (heads, MLP), and into how many parts."""
    boxes = jax.tree.leaves(abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    sizes = {name: size for box in boxes for name, size in zip(box.names, box.value.shape, strict=True)}
    words = {word: activation for word, activation in ACTIVATION_OF.items() if word in sizes and word != "embed"}
    parts = {sizes[word]: layout.num_parts(activation) for word, activation in words.items()}
    return {size: number for size, number in parts.items() if number > 1}


def _logits(config: ModelConfig, model: LanguageModel, layout: Layout, rows: int) -> int:
    vocab = config.padded(model.vocab_size)
    shards = layout.num_batch_shards
    parts = layout.num_parts("act_vocab")
    head = vocab * config.hidden_dim * 4 // parts
    return 3 * 4 * logits_held(rows * shards, config.seq_len, vocab) // shards // parts + head


def advise(memory: Memory, config: ModelConfig, rows: int, is_split: bool) -> list[str]:
    """What to turn down when a run does not fit, what acts on most bytes first.

    `is_split` says that FSDP splits the state over several devices already.
    """
    sizes = {**memory.state, **memory.work}
    saved = sizes["saved activations"] + sizes["one block's activations"]
    options = [
        (
            saved + 1,  # before the next one, which costs more time
            config.gradient_checkpointing not in (True, "full", "offload"),
            "model.gradient_checkpointing: true recomputes each block instead of keeping its values; same result",
        ),
        (
            saved,
            rows > 1,
            f"trainer.per_device_parallelism: {max(rows // 2, 1)} accumulates over more microbatches; same result",
        ),
        (
            sizes["optimizer"] + sizes["params"],
            not is_split,
            "trainer.fsdp_axis: embed, with several devices, splits parameters and optimizer state over them; "
            "same result",
        ),
        (
            sizes["optimizer"] + sizes["params"],
            is_split,
            "more devices: each then holds a smaller part of parameters and optimizer state; same result",
        ),
        (
            sizes["one block's activations"],
            True,
            "trainer.model_axis_size: 2 or more with tensor_parallel_axes: [mlp, heads] splits each block; same result",
        ),
        (
            sizes["optimizer"] // 2,
            True,
            "optimizer.type: lion keeps half of Adam's moments, adafactor hardly any; learns otherwise",
        ),
        (
            sizes["params"] // 2,
            "copy of the parameters" in sizes,
            "trainer.mp: bf16 keeps no float32 parameters and moments; less exact",
        ),
        (saved // 2, True, f"model.seq_len: {config.seq_len // 2} halves activations; another model"),
    ]
    return [text for _, applies, text in sorted(options, key=lambda option: -option[0]) if applies]
