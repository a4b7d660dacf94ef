"""A stack of blocks with parameters stacked over layers, [N, ...] each.

How the stack runs (one compiled period in a loop, or unrolled; with or without recomputation) never changes the
parameters' layout, nor the results beyond rounding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from lmtrain.models.attention.attend import SCORES
from lmtrain.models.interface import NO_DOCUMENTS, Documents
from lmtrain.models.layers.linear import LORA
from lmtrain.models.layers.quantized import QUANTIZED
from lmtrain.models.layers.remat import checkpoint, remat
from lmtrain.models.moe.load import LOAD
from lmtrain.models.params import AUXILIARY

# A stack of blocks that differ by a pattern: a loop over its periods, with one set of stacked parameters.
#
# A parameter is stacked over the layers that have it: [N, ...] if all have it. With the pattern (local, local, global),
# 7 layers and a matrix of every block, [7, ...], the loop runs over the first 6 as [2, 3, ...], and the last layer
# follows it. The loop reads contiguous parts of the stack and takes a layer's own part inside, so no parameter is
# copied; only with a remainder, the part before it is.

Path = tuple[str, ...]

# Collections of values that leave the stack: metrics (`lmtrain.tracking.jit_log`), auxiliary losses, loads of experts,
# scores of attention.
SOWN = ("metrics", AUXILIARY, LOAD, SCORES)


class PatternStack(nn.Module):
    """`num_layers` blocks: block number i has the arguments `pattern[i % len(pattern)]`. See `stack`."""

    block: type[nn.Module]
    pattern: tuple[tuple[Any, ...], ...]
    num_layers: int
    scan: bool
    policy: bool | str

    def __call__(
        self, x: jax.Array, layers_N: jax.Array, deterministic: bool, documents: Documents
    ) -> tuple[jax.Array, None]:
        if self.is_initializing():
            for name, value in self._new_parameters(x).items():
                self.put_variable("params", name, value)

        def call(block: nn.Module, variables: Any, x: jax.Array, layer: jax.Array, keys: Any) -> Any:
            return block.apply(variables, x, layer, deterministic, documents, rngs=keys, mutable=self._sown)

        return self._run(call, x, x, layers_N, self.policy), None

    def extend(
        self, state: tuple[jax.Array, Any], layers_N: jax.Array, start: jax.Array, count: Any = None
    ) -> tuple[tuple[jax.Array, Any], None]:
        """`extend` of each block in turn."""

        def call(block: nn.Module, variables: Any, state: Any, layer: jax.Array, keys: Any) -> Any:
            return block.apply(variables, state, layer, start, count, method="extend", rngs=keys, mutable=self._sown)

        return self._run(call, state, state[0], layers_N, policy=False), None

    @property
    def _sown(self) -> list[str]:
        return [name for name in SOWN if self.is_mutable_collection(name)]

    def _blocks(self) -> list[nn.Module]:
        return [self.block(*arguments, parent=None) for arguments in self.pattern]

    def _run(self, call: Callable[..., Any], carry: Any, x: jax.Array, layers_N: jax.Array, policy: bool | str) -> Any:
        """The carry after all blocks; what they sow is sown here, stacked over layers."""
        period = len(self.pattern)
        periods, rest = divmod(self.num_layers, period)
        stacked = nn.meta.unbox(
            flatten_dict({name: self.variables.get(name, {}) for name in ("params", LORA, QUANTIZED)})
        )
        owners = self._owners(stacked, x)
        keys_N = {
            name: jax.random.split(self.make_rng(name), self.num_layers)
            for name in ("dropout", LORA)
            if self.has_rng(name)
        }

        def run(carry: Any, part: Any, blocks: Sequence[Callable[..., Any]]) -> tuple[Any, list[Any]]:
            """The blocks of one period, given its part of the stacked arrays."""
            variables, layers, keys = part
            all_sown = []
            for number, block in enumerate(blocks):
                own = {
                    path: leaf[owners[path].index(number)] for path, leaf in variables.items() if number in owners[path]
                }
                own_keys = {name: key[number] for name, key in keys.items()}
                (carry, _), sown = block(unflatten_dict(own), carry, layers[number], own_keys)
                all_sown.append(sown)
            return carry, all_sown

        def blocks(is_scanned: bool) -> list[Callable[..., Any]]:
            return [checkpoint(functools.partial(call, block), policy, is_scanned) for block in self._blocks()]

        def cut(leaf: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
            """The complete periods, [periods, size, ...], and the rest."""
            end = periods * size
            complete = leaf if end == len(leaf) else leaf[:end]
            return complete.reshape(periods, size, *leaf.shape[1:]), leaf[end:]

        arrays = stacked, layers_N, keys_N
        sizes = {path: len(numbers) for path, numbers in owners.items()}, period, dict.fromkeys(keys_N, period)
        pairs = jax.tree.map(cut, arrays, sizes)
        complete, remainder = (jax.tree.map(lambda _, pair, i=i: pair[i], arrays, pairs) for i in (0, 1))
        all_sown: dict[Path, list[Any]] = {}
        if periods:
            unroll = 1 if self.scan else periods
            loop = blocks(self.scan)
            carry, sown = jax.lax.scan(lambda carry, part: run(carry, part, loop), carry, complete, unroll=unroll)
            self._add(all_sown, sown, 0)
        if rest:
            carry, sown = run(carry, remainder, blocks(is_scanned=False)[:rest])
            self._add(all_sown, jax.tree.map(lambda x: x[None], sown), periods * period)
        for path, by_layer in all_sown.items():
            layers = np.concatenate([layers for layers, _ in by_layer])
            order = np.argsort(layers)
            values = jax.tree.map(lambda *parts, o=order: jnp.concatenate(parts)[o], *(value for _, value in by_layer))
            self._put(path, values)
        return carry

    def _add(self, all_sown: dict[Path, list[Any]], sown: list[Any], first: int) -> None:
        """Add what the blocks of the pattern have sown, each [periods, ...], with the numbers of their layers."""
        for number, of_block in enumerate(sown):
            for path, values in flatten_dict(of_block).items():
                size = len(jax.tree.leaves(values)[0])
                layers = first + number + len(self.pattern) * np.arange(size)
                all_sown.setdefault(path, []).append((layers, values))

    def _put(self, path: Path, value: Any) -> None:
        """Set a variable of a block, whose path begins with its collection."""
        collection, name, *inner = path
        if inner:
            others: Any = self.get_variable(collection, name, {})
            value = unflatten_dict(flatten_dict(others) | {tuple(inner): value})
        self.put_variable(collection, name, value)

    def _owners(self, stacked: Mapping[Path, Any], x: jax.Array) -> dict[Path, list[int]]:
        """The numbers of the pattern's blocks that have each parameter; adapters belong to the modules' parameters."""
        every = list(range(len(self.pattern)))
        if all(len(leaf) == self.num_layers for leaf in stacked.values()):
            return dict.fromkeys(stacked, every)
        shapes = [flatten_dict(jax.eval_shape(_initializer(block, x), jax.random.key(0))) for block in self._blocks()]
        modules = [{path[:-1] for path in paths} for paths in shapes]
        return {path: [number for number in every if path[1:-1] in modules[number]] for path in stacked}

    def _new_parameters(self, x: jax.Array) -> Any:
        """Initial values: those of each layer are a function of its own key."""
        keys_N = jax.random.split(self.make_rng("params"), self.num_layers)
        parts: dict[Path, list[Any]] = {}
        layers: dict[Path, list[int]] = {}
        for number, block in enumerate(self._blocks()[: self.num_layers]):
            values = jax.lax.map(_initializer(block, x), keys_N[number :: len(self.pattern)])
            for path, value in flatten_dict(values).items():
                parts.setdefault(path, []).append(value)
                layers.setdefault(path, []).extend(range(number, self.num_layers, len(self.pattern)))
        stacked = {
            path: jax.tree.map(lambda *leaves, path=path: jnp.concatenate(leaves)[np.argsort(layers[path])], *values)
            for path, values in parts.items()
        }
        return nn.meta.add_axis(unflatten_dict(stacked), 0, {nn.PARTITION_NAME: "layers"})


def _initializer(block: nn.Module, x: Any) -> Callable[[jax.Array], Any]:
    """A function of a key that makes the parameters of a block whose input is like `x`."""
    return lambda key: block.init({"params": key}, x, jnp.int32(0), True, NO_DOCUMENTS)["params"]


def layers_of_modules(
    block: type[nn.Module], pattern: Sequence[tuple[Any, ...]], num_layers: int, hidden_dim: int
) -> dict[str, tuple[int, ...]]:
    """The numbers of the layers that have each module of a block, by its path within the block; empty if all have all.
    A module's parameters are stacked over these."""
    if len(pattern) == 1:
        return {}
    x = np.zeros((1, 2, hidden_dim), np.float32)
    owners: dict[str, set[int]] = {}
    for number, arguments in enumerate(pattern):
        made = block(*arguments, parent=None)
        shapes = jax.eval_shape(_initializer(made, x), jax.random.key(0))
        for path in flatten_dict(shapes):
            owners.setdefault("/".join(path[:-1]), set()).add(number)
    each = range(num_layers)
    return {path: tuple(i for i in each if i % len(pattern) in numbers) for path, numbers in owners.items()}


def stack(
    block: type[nn.Module], pattern: Sequence[tuple[Any, ...]], num_layers: int, scan: bool, policy: bool | str
) -> nn.Module:
    """`num_layers` blocks, with gradient checkpointing by `policy` (see `remat`).

    `pattern` has the arguments of the block for the first layers, such as a config for local and one for global
    attention; it repeats over the depth, the last time perhaps in part.

    The block has `__call__(x, layer, deterministic, documents) -> (x, None)` and
    `extend((x, cache), layer, start, count) -> ((x, cache), None)`; `layer` has a leading layer dimension outside, and
    none inside. The cache is that of all layers, so that each writes its new positions in place.
    """
    if len(pattern) > 1:
        return PatternStack(block, tuple(pattern), num_layers, scan, policy)
    shared = {
        "variable_axes": {"params": 0, LORA: 0, QUANTIZED: 0, **dict.fromkeys(SOWN, 0)},
        "split_rngs": {"params": True, "dropout": True, LORA: True},
        "length": num_layers,
        "unroll": 1 if scan else num_layers,
        "metadata_params": {nn.PARTITION_NAME: "layers"},
    }
    scanned = nn.scan(
        remat(block, policy, scan, static_argnums=(3,)),
        methods={
            "__call__": {"in_axes": (0, nn.broadcast, nn.broadcast), **shared},
            "extend": {"in_axes": (0, nn.broadcast, nn.broadcast), **shared},
        },
    )
    module: nn.Module = scanned(*pattern[0])
    return module
