"""A stack of blocks with parameters stacked over layers, [N, ...] each.

How the stack runs (one compiled period in a loop, or unrolled; with or without recomputation) never changes the
parameters' layout, nor the results beyond rounding.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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

# A stack of blocks that differ by a pattern: the first layers, then a loop over periods, with one set of stacked
# parameters.
#
# A parameter is stacked over the layers that have it: [N, ...] if all have it. With the pattern (local, local, global),
# 7 layers and a matrix of every block, [7, ...], the loop runs over the first 6 as [2, 3, ...], and the last layer
# follows it. The loop reads contiguous parts of the stack and takes a layer's own part inside, so no parameter is
# copied; only with first layers of their own, or a remainder, the part of the loop is.


class Pattern(NamedTuple):
    """What the blocks of a stack are made of: the `first` ones, then `repeated` over the depth, the last time perhaps
    in part."""

    first: tuple[Any, ...]
    repeated: tuple[Any, ...]

    @property
    def each(self) -> tuple[Any, ...]:
        """The different ones, in their order."""
        return self.first + self.repeated

    def layers(self, number: int, num_layers: int) -> range:
        """The layers whose block is that of this number in `each`."""
        is_first = number < len(self.first)
        return range(number, number + 1) if is_first else range(number, num_layers, len(self.repeated))


Path = tuple[str, ...]

# Collections of values that leave the stack: metrics (`lmtrain.tracking.jit_log`), auxiliary losses, loads of experts,
# scores of attention.
SOWN = ("metrics", AUXILIARY, LOAD, SCORES)


class PatternStack(nn.Module):
    """`num_layers` blocks whose arguments are those of `pattern`. See `stack`."""

    block: type[nn.Module]
    pattern: Pattern
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
        return [self.block(*arguments, parent=None) for arguments in self.pattern.each]

    def _run(self, call: Callable[..., Any], carry: Any, x: jax.Array, layers_N: jax.Array, policy: bool | str) -> Any:
        """The carry after all blocks; what they sow is sown here, stacked over layers."""
        before, period = len(self.pattern.first), len(self.pattern.repeated)
        periods, rest = divmod(self.num_layers - before, period)
        stacked = nn.meta.unbox(
            flatten_dict({name: self.variables.get(name, {}) for name in ("params", LORA, QUANTIZED)})
        )
        owners = self._owners(stacked, x)
        keys_N = {
            name: jax.random.split(self.make_rng(name), self.num_layers)
            for name in ("dropout", LORA)
            if self.has_rng(name)
        }

        def run(carry: Any, part: Any, blocks: Mapping[int, Callable[..., Any]]) -> tuple[Any, list[Any]]:
            """Some blocks, by their numbers in the pattern, given their part of the stacked arrays."""
            variables, layers, keys = part
            all_sown = []
            for place, (number, block) in enumerate(blocks.items()):
                own = {
                    path: leaf[sum(other in owners[path] for other in blocks if other < number)]
                    for path, leaf in variables.items()
                    if number in owners[path]
                }
                own_keys = {name: key[place] for name, key in keys.items()}
                (carry, _), sown = block(unflatten_dict(own), carry, layers[place], own_keys)
                all_sown.append(sown)
            return carry, all_sown

        def blocks(first: int, count: int, is_scanned: bool = False) -> dict[int, Callable[..., Any]]:
            made = self._blocks()[first : first + count]
            return {
                first + i: checkpoint(functools.partial(call, block), policy, is_scanned)
                for i, block in enumerate(made)
            }

        def cut(leaf: jax.Array, numbers: Sequence[int]) -> tuple[jax.Array, ...]:
            """The first layers, the complete periods, [periods, size, ...], and the rest, of these blocks."""
            begin = sum(number < before for number in numbers)
            size = len(numbers) - begin
            end = begin + periods * size
            complete = leaf if (begin, end) == (0, len(leaf)) else leaf[begin:end]
            return leaf[:begin], complete.reshape(periods, size, *leaf.shape[1:]), leaf[end:]

        arrays, every = (stacked, layers_N, keys_N), range(before + period)
        parts = (
            {path: cut(leaf, owners[path]) for path, leaf in stacked.items()},
            cut(layers_N, every),
            {name: cut(key, every) for name, key in keys_N.items()},
        )
        first, complete, remainder = (jax.tree.map(lambda _, part, i=i: part[i], arrays, parts) for i in range(3))
        all_sown: dict[Path, list[Any]] = {}
        if before:
            carry, sown = run(carry, first, blocks(0, before))
            self._add(all_sown, jax.tree.map(lambda x: x[None], sown), 0)
        if periods:
            unroll = 1 if self.scan else periods
            loop = blocks(before, period, self.scan)
            carry, sown = jax.lax.scan(lambda carry, part: run(carry, part, loop), carry, complete, unroll=unroll)
            self._add(all_sown, sown, before)
        if rest:
            carry, sown = run(carry, remainder, blocks(before, rest))
            self._add(all_sown, jax.tree.map(lambda x: x[None], sown), before + periods * period)
        for path, by_layer in all_sown.items():
            layers = np.concatenate([layers for layers, _ in by_layer])
            order = np.argsort(layers)
            values = jax.tree.map(lambda *parts, o=order: jnp.concatenate(parts)[o], *(value for _, value in by_layer))
            self._put(path, values)
        return carry

    def _add(self, all_sown: dict[Path, list[Any]], sown: list[Any], first: int) -> None:
        """Add what neighbouring blocks have sown, each [periods, ...], with the numbers of their layers."""
        for number, of_block in enumerate(sown):
            for path, values in flatten_dict(of_block).items():
                size = len(jax.tree.leaves(values)[0])
                layers = first + number + len(self.pattern.repeated) * np.arange(size)
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
        every = list(range(len(self.pattern.each)))
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
            own = self.pattern.layers(number, self.num_layers)
            values = jax.lax.map(_initializer(block, x), keys_N[own.start : own.stop : own.step])
            for path, value in flatten_dict(values).items():
                parts.setdefault(path, []).append(value)
                layers.setdefault(path, []).extend(own)
        stacked = {
            path: jax.tree.map(lambda *leaves, path=path: jnp.concatenate(leaves)[np.argsort(layers[path])], *values)
            for path, values in parts.items()
        }
        return nn.meta.add_axis(unflatten_dict(stacked), 0, {nn.PARTITION_NAME: "layers"})


def _initializer(block: nn.Module, x: Any) -> Callable[[jax.Array], Any]:
    """A function of a key that makes the parameters of a block whose input is like `x`."""
    return lambda key: block.init({"params": key}, x, jnp.int32(0), True, NO_DOCUMENTS)["params"]


def layers_of_modules(
    block: type[nn.Module], pattern: Pattern, num_layers: int, hidden_dim: int
) -> dict[str, tuple[int, ...]]:
    """The numbers of the layers that have each module of a block, by its path within the block; empty if all have all.
    A module's parameters are stacked over these."""
    if len(pattern.each) == 1:
        return {}
    x = np.zeros((1, 2, hidden_dim), np.float32)
    layers: dict[str, set[int]] = {}
    for number, arguments in enumerate(pattern.each):
        made = block(*arguments, parent=None)
        shapes = jax.eval_shape(_initializer(made, x), jax.random.key(0))
        for path in flatten_dict(shapes):
            layers.setdefault("/".join(path[:-1]), set()).update(pattern.layers(number, num_layers))
    return {path: tuple(sorted(numbers)) for path, numbers in layers.items()}


def stack(block: type[nn.Module], pattern: Pattern, num_layers: int, scan: bool, policy: bool | str) -> nn.Module:
    """`num_layers` blocks, with gradient checkpointing by `policy` (see `remat`).

    `pattern` has the arguments of the blocks, such as a config for local and one for global attention.

    The block has `__call__(x, layer, deterministic, documents) -> (x, None)` and
    `extend((x, cache), layer, start, count) -> ((x, cache), None)`; `layer` has a leading layer dimension outside, and
    none inside. The cache is that of all layers, so that each writes its new positions in place.
    """
    if len(pattern.each) > 1:
        return PatternStack(block, pattern, num_layers, scan, policy)
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
    module: nn.Module = scanned(*pattern.repeated[0])
    return module
