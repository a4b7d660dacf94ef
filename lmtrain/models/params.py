"""The parameters of any model, as a tree: shapes, names of dimensions, counts, dtypes, storage in few bits; and the
auxiliary losses and metrics that its layers add.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from lmtrain.models.attention.names import PLAIN
from lmtrain.models.gated_delta.config import EXACT
from lmtrain.models.interface import LanguageModel
from lmtrain.models.layers.four_bits import ARRAYS, LEVELS, block_size, in_blocks
from lmtrain.models.layers.quantized import EIGHT_BIT_TYPES, FORMATS, KERNEL, SCALE, Quantized, quantize
from lmtrain.models.moe.load import BIAS
from lmtrain.sharding.axes import Axes, as_names

# Beginning of the names of arrays that a matrix stored in 8 or 4 bits has in place of itself, or next to it.
_STORED = f"{KERNEL}_"

# Beginnings of the names of modules whose parameters are not rounded for a computation in 16 bits.
_NOT_ROUNDED = ("norm_", "router")

# Between nested maps and maps from slash-separated paths.
flatten, unflatten = functools.partial(flatten_dict, sep="/"), functools.partial(unflatten_dict, sep="/")


@functools.lru_cache(maxsize=8)
def abstract_params(model: LanguageModel) -> Any:
    """Shapes, dtypes and logical names of the parameters, without computing them."""
    return jax.eval_shape(initializer(model), jax.random.key(0))


@functools.lru_cache(maxsize=8)
def initializer(model: LanguageModel) -> Callable[[jax.Array], Any]:
    """key -> parameters, boxed with their names. One function for shapes and values, traced once."""
    return jax.jit(lambda key: without_kernels(model).init(key, jnp.zeros((1, 2), jnp.int32))["params"])


def without_kernels(model: LanguageModel) -> LanguageModel:
    """The same model with plain attention, for a few tokens in float32, which not every backend supports."""
    return model.clone(attention=PLAIN)


def count_parameters(model: LanguageModel) -> int:
    """Number of parameters, without padding of the vocabulary."""
    boxes = jax.tree.leaves(abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    return sum(
        math.prod(
            model.vocab_size if name == "vocab" else size for name, size in zip(box.names, box.value.shape, strict=True)
        )
        for box in boxes
    )


def shapes_by_path(boxed: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a tree of abstract parameters, by slash-separated paths."""
    return {path: leaf.shape for path, leaf in flatten(nn.meta.unbox(boxed)).items()}


def parameter_axes(model: LanguageModel) -> Any:
    """The logical names of each parameter's dimensions (`Axes`), in the tree of the parameters."""
    return jax.tree.map(
        lambda box: Axes(box.names, getattr(box, "outputs", 0)),
        abstract_params(model),
        is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned),
    )


def with_dtype(abstract: Any, dtype: str) -> Any:
    """The same shapes with another dtype, except those of biases that balance the load of experts, and of decays."""
    return _map_changeable(lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), abstract)


def cast(params: Any, dtype: str) -> Any:
    """Every leaf in `dtype`, except biases that balance the load of experts, since their updates are small, decays of
    Gated DeltaNet, and parameters that are stored in few bits."""
    return _map_changeable(lambda _, leaf: leaf.astype(dtype), params)


def cast_to_compute(params: Any, dtype: str) -> Any:
    """`cast` without rounding the parameters of norms and routers: these few compute in float32. Rounded to 16 bits,
    those of norms are the largest error of many gradients, and those of routers select other experts."""

    def change(path: Sequence[str], leaf: Any) -> Any:
        is_exact = any(name.startswith(_NOT_ROUNDED) for name in path[:-1])
        return leaf.astype(jnp.promote_types(leaf.dtype, dtype) if is_exact else dtype)

    return _map_changeable(change, params)


def _map_changeable(function: Callable[[Sequence[str], Any], Any], params: Any) -> Any:
    def change(path: Any, leaf: Any) -> Any:
        names = [str(getattr(entry, "key", "")) for entry in path]
        is_kept = names[-1] in (BIAS, *EXACT) or names[-1].startswith(_STORED) or leaf.dtype in EIGHT_BIT_TYPES
        return leaf if is_kept else function(names, leaf)

    return jax.tree_util.tree_map_with_path(change, params)


# Auxiliary losses: named values that blocks add to the training loss, such as the load balance of a router.
#
#     class Router(nn.Module):
#         def __call__(self, x_BSD):
#             ...
#             add_auxiliary(self, "train/load_balance", imbalance_B.sum(), x_BSD.shape[0], coefficient=0.01)
#
# A value is a sum and the weight of that sum. The step adds, for each name,
#
#     coefficient * (sum of totals) / (sum of weights)
#
# over all layers, microbatches and devices, to the mean of the objective, and logs the quotient under the name; it logs
# the objective itself, without auxiliary losses, as `train/loss`. With a coefficient of 0 the value is only a metric.
#
# Evaluation, benchmarks, sampling and estimates of the Hessian leave auxiliary losses out, and compute nothing for
# them.

# The collection of variables that models sow into.
AUXILIARY = "auxiliary"


class Auxiliary(struct.PyTreeNode):
    """Sums over positions, float32: scalars; of several layers, [N] each."""

    total: jax.Array
    weight: jax.Array
    coefficient: float = struct.field(pytree_node=False)


def add_auxiliary(module: nn.Module, name: str, total: Any, weight: Any, coefficient: float) -> None:
    """Add a sum and its weight, both scalars over the entire batch that `module` sees; no gradient flows to `weight`.

    `name` is that of the logged metric, `train/...`. All layers that use a name have the same coefficient.
    """
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    module.sow(AUXILIARY, name, Auxiliary(jnp.asarray(total, jnp.float32), weight, coefficient))


def collect(sown: Mapping[str, Any]) -> dict[str, Auxiliary]:
    """What a model has sown, by name: [N] sums over positions, of all layers that use the name."""
    sums: dict[str, Auxiliary] = {}
    leaves = jax.tree_util.tree_leaves_with_path(sown.get(AUXILIARY, {}), is_leaf=lambda leaf: type(leaf) is Auxiliary)
    for path, value in leaves:
        name = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)][-1]
        if name in sums and sums[name].coefficient != value.coefficient:
            raise ValueError(f"add_auxiliary: {name} has two coefficients; give them different names")
        value = jax.tree.map(jnp.ravel, value)
        sums[name] = jax.tree.map(lambda *parts: jnp.concatenate(parts), sums[name], value) if name in sums else value
    return sums


@functools.lru_cache(maxsize=8)
def has_auxiliary(model: LanguageModel) -> bool:
    """Whether training adds auxiliary losses."""
    model = without_kernels(model)
    params = nn.meta.unbox(abstract_params(model))
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    with nn.logical_axis_rules([]):  # two tokens do not divide over devices
        _, sown = jax.eval_shape(
            lambda params, tokens: model.apply({"params": params}, tokens, True, method="hidden", mutable=[AUXILIARY]),
            params,
            tokens,
        )
    return bool(jax.tree.leaves(sown))


_BLOCKS, _EXPERTS = "blocks", "experts"
# Layers with few outputs on which much depends: routers, and the gates of Gated DeltaNet.
_NOT_IN_8_BITS = ("router", "a", "b")


def copies(params: Any, products: str, experts: bool = True) -> Any:
    """The collection `QUANTIZED` for products in a format (`FORMATS`): 8-bit copies of the blocks' matrices.

    Those that are stored in 8 bits are used as they are. Without `experts`, those of experts have no copy.
    """
    flat = flatten(params)
    found: dict[str, jax.Array] = {}
    for layer in _layers(flat, experts):
        kernel = flat[f"{layer}/{KERNEL}"]
        if kernel.dtype in EIGHT_BIT_TYPES:
            part = Quantized(kernel, flat[f"{layer}/{_STORED}{SCALE}"])
        else:
            part = by_layer(kernel, products)
        found |= {f"{layer}/{KERNEL}": part.values, f"{layer}/{SCALE}": part.scale}
    return unflatten(found)


def in_storage(kernel: jax.Array, storage: str, outputs: int) -> dict[str, jax.Array]:
    """A stack of matrices [layers, *inputs, *outputs] in a format, by the names of its arrays; `outputs` is the number
    of these dimensions."""
    if storage in LEVELS:
        blocks = jax.lax.map(lambda matrix: in_blocks(matrix, outputs, storage), kernel)
        return {f"{_STORED}{storage}": blocks.codes, **{f"{_STORED}{name}": getattr(blocks, name) for name in ARRAYS}}
    part = by_layer(kernel, storage)
    return {KERNEL: part.values, f"{_STORED}{SCALE}": part.scale}


def to_storage(path: str, shape: Sequence[int], storage: str, axes: Axes) -> Callable[..., Any] | None:
    """The function array -> arrays by path for a frozen parameter in the format `storage`, of 8 or 4 bits; None: it
    stays as it is. Blocks' matrices are stored, but for those of experts, in 4 bits also for those with an odd number
    of inputs."""
    if not has_copy(path.split("/"), experts=False):
        return None
    if storage in LEVELS and not block_size(math.prod(shape[1 : len(shape) - axes.outputs])):
        return None
    layer = path.rpartition("/")[0]

    def convert(kernel: jax.Array) -> dict[str, jax.Array]:
        return {f"{layer}/{name}": array for name, array in in_storage(kernel, storage, axes.outputs).items()}

    return convert


def stored(params: Any, storage: str | None, axes: Any) -> Any:
    """Frozen parameters in the format `storage`, None for that of the parameters; see `to_storage`. `axes` are those of
    `parameter_axes`."""
    if storage is None:
        return params
    flat: dict[str, Any] = {}
    names = flatten(axes)
    for path, leaf in flatten(params).items():
        convert = to_storage(path, leaf.shape, storage, names[path])
        flat |= {path: leaf} if convert is None else convert(leaf)
    return unflatten(flat)


def storage_spec(shape: Sequence[int], spec: Sequence[Any], axes: Axes, sizes: Mapping[str, int]) -> PartitionSpec:
    """How an array of a stored matrix is split, whose own dimensions would be split as in `spec`. `sizes` are those of
    the mesh's axes.

    Blocks and outputs are split like inputs and outputs, if they divide.
    """
    outputs = axes.outputs
    spec = [*spec, *[None] * (len(axes) - len(spec))]
    if len(shape) < 2 + outputs:
        return PartitionSpec()
    split = [*spec[:2], *[None] * (len(shape) - 2 - outputs), *spec[len(spec) - outputs :]]
    parts = [math.prod(sizes[name] for name in as_names(entry)) for entry in split]
    return PartitionSpec(
        *(None if size % part else entry for size, part, entry in zip(shape, parts, split, strict=True))
    )


def take_stored(params: Any) -> tuple[Any, Any]:
    """Parameters without the arrays of those that are stored in few bits, and the collection `QUANTIZED` of these."""
    flat = dict(flatten(params))
    found = {}
    for path in list(flat):
        layer, _, name = path.rpartition("/")
        if name.startswith(_STORED):
            found[f"{layer}/{name.removeprefix(_STORED)}"] = flat.pop(path)
    return unflatten(flat), unflatten(found)


def has_copy(path: Sequence[str], experts: bool = True) -> bool:
    """Whether the parameter at a path of the model's tree has an 8-bit copy; `experts`: those of experts have."""
    *layer, name = path
    is_matrix = name == KERNEL and layer[0] == _BLOCKS and layer[-1] not in _NOT_IN_8_BITS
    return is_matrix and (experts or _EXPERTS not in layer)


def _layers(flat: Any, experts: bool) -> list[str]:
    return [path.rpartition("/")[0] for path in flat if has_copy(path.split("/"), experts)]


def by_layer(kernel: jax.Array, products: str) -> Quantized:
    """A stack of matrices [layers, ...] in 8 bits, with a scale for each layer."""
    return quantize(kernel, FORMATS[products].values, tuple(range(1, kernel.ndim)))
