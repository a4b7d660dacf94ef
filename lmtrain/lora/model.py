"""A model with adapters, with the interface of every model: evaluation and sampling use it like any other."""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.lora.config import LoraConfig
from lmtrain.lora.sites import (
    A,
    B,
    Site,
    check_rank,
    choose_sites,
    choose_tables,
    list_sites,
    list_tables,
    names_in_mixtures,
)
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel, LogitCap
from lmtrain.models.layers.linear import LORA, RATE
from lmtrain.models.layers.quantized import QUANTIZED
from lmtrain.models.params import abstract_params, flatten, shapes_by_path, take_stored, unflatten
from lmtrain.models.registry import hf_family
from lmtrain.sharding.mesh import Layout

# Adapters as a tree of arrays: initial values, and merging into the base.
#
#     <layer>/lora_a [r, in], <layer>/lora_b [out, r]   the adapter of a linear layer; with a first dimension in stacks
#     <path of a parameter>                             a parameter that is trained in full, instead of the base's
#
# Both are stored in the shapes of PEFT's files.


def init_adapters(sites: Sequence[Site], r: int, key: jax.Array) -> dict[str, Any]:
    """New adapters by path, boxed with their logical names: `lora_a` random, as PEFT initializes it, `lora_b` zero.

    PEFT's `kaiming_uniform_(a, sqrt(5))` is uniform within 1 / sqrt(in).
    """
    flat = {}
    for number, site in enumerate(sites):
        lead, names = ((), ()) if site.layers is None else ((len(site.layers),), ("layers",))
        bound = site.inputs**-0.5
        values = jax.random.uniform(
            jax.random.fold_in(key, number), (*lead, r, site.inputs), jnp.float32, -bound, bound
        )
        flat[f"{site.path}/{A}"] = nn.LogicallyPartitioned(values, (*names, "lora_rank", None))
        zeros = jnp.zeros((*lead, site.outputs, r))
        flat[f"{site.path}/{B}"] = nn.LogicallyPartitioned(zeros, (*names, None, "lora_rank"))
    return flat


def merge_layer(kernel: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """A layer's kernel plus `scale` * (B A)^T in float32; where that is zero, its bits do not change."""
    kernel, a, b = (array.astype(np.float32) for array in (kernel, a, b))
    delta = (np.float32(scale) * (b @ a)).T.reshape(kernel.shape)
    return np.where(delta == 0, kernel, kernel + delta)


def trained_in_full(flat: Mapping[str, Any]) -> list[str]:
    """The paths of the parameters that are trained in full, in a tree of adapters by path."""
    return [path for path in flat if not path.endswith((f"/{A}", f"/{B}"))]


def start_from(adapters: Any, base: Any) -> Any:
    """The adapters, with the base's values of the parameters that are trained in full."""
    flat, values = flatten(adapters), flatten(base)
    copied = {path: values[path].astype(flat[path].dtype) for path in trained_in_full(flat)}
    return unflatten(flat | copied)


# The parts of the parameters.
BASE, ADAPTERS = "base", "adapters"


@dataclass(frozen=True, kw_only=True)
class AdaptedModel:
    """`inner` with adapters on the layers `sites`; the parameters at the paths `in_full` are trained in full.

    Its parameters are {"base": those of `inner`, "adapters": see `lmtrain/lora/model.py`}. The adapters' outputs are
    multiplied by `scale`. With an rng named `dropout`, their inputs have dropout at `rate`.
    """

    inner: LanguageModel
    sites: tuple[Site, ...]
    in_full: tuple[str, ...]
    r: int
    scale: float
    rate: float = 0.0

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def forgets(self) -> bool:
        return self.inner.forgets

    def layers_of_modules(self) -> Mapping[str, Sequence[int]]:
        return self.inner.layers_of_modules()

    @property
    def logit_cap(self) -> LogitCap | None:
        return self.inner.logit_cap

    @property
    def has_dropout(self) -> bool:
        return self.inner.has_dropout or self.rate > 0

    def clone(self, **changes: Any) -> "AdaptedModel":
        return replace(self, inner=self.inner.clone(**changes))

    def init(self, key: jax.Array, tokens_BS: jax.Array) -> Any:
        """Linen's init, with the parts of the parameters."""
        base = self.inner.init(key, tokens_BS)["params"]
        flat = init_adapters(self.sites, self.r, jax.random.fold_in(key, 1))
        values = flatten(base)
        return {"params": {BASE: base, ADAPTERS: unflatten(flat | {path: values[path] for path in self.in_full})}}

    def apply(self, variables: Any, *arguments: Any, rngs: Any = None, **keywords: Any) -> Any:
        """Linen's apply of `inner`, with the adapters as a collection of variables."""
        parts = variables["params"]
        flat = flatten(parts[ADAPTERS])
        base, of_stored = take_stored(parts[BASE])
        if full := trained_in_full(flat):
            base = unflatten(flatten(base) | {path: flat.pop(path) for path in full})
        for name in [name for name in flat if name.endswith(f"/{B}")]:
            # in float32: a scale rounded to bfloat16 would differ from that of merged weights
            flat[name] = (flat[name].astype(jnp.float32) * self.scale).astype(flat[name].dtype)
        rngs = dict(rngs or {})
        if self.rate and "dropout" in rngs:
            rngs[LORA] = jax.random.fold_in(rngs["dropout"], 1)
            for name in [name for name in flat if name.endswith(f"/{A}")]:
                lead = flat[name].shape[:-2]
                flat[f"{name.removesuffix(A)}{RATE}"] = jnp.full(lead, self.rate, jnp.float32)
        for site in self.sites:
            if site.parts:
                own = {name: flat.pop(f"{site.path}/{name}") for name in (A, B, RATE) if f"{site.path}/{name}" in flat}
                for number, path in enumerate(site.parts):
                    values = own | {B: site.of_part(number, own[B])}
                    flat |= {f"{path}/{name}": value for name, value in values.items()}
        everything = {**variables, "params": base, LORA: unflatten(flat)}
        if of_stored:
            everything[QUANTIZED] = unflatten(flatten(of_stored) | flatten(variables.get(QUANTIZED, {})))
        return self.inner.apply(everything, *arguments, rngs=rngs or None, **keywords)


def adapt(config: LoraConfig | None, model_config: ModelConfig, model: LanguageModel) -> LanguageModel:
    """The model with the adapters of a config; the model itself without one.

    Raises `UserError` for names of layers that the model does not have, and for a rank that is too large for one.
    """
    if config is None:
        return model
    table = hf_family(model_config.type).table(model_config)
    all_sites = list_sites(table, shapes_by_path(abstract_params(model)))
    sites = choose_sites(config.target_modules, all_sites, names_in_mixtures(table))
    check_rank(config.r, sites)
    tables = choose_tables(config.modules_to_save, list_tables(table))
    in_full = tuple(table.path for table in tables)
    adapted: Any = AdaptedModel(
        inner=model, sites=tuple(sites), in_full=in_full, r=config.r, scale=config.scale, rate=config.dropout
    )
    return cast(LanguageModel, adapted)  # its other methods are those of `inner`, called through `apply`


def trainable(model: LanguageModel, whole: Any) -> Any:
    """The part of a tree like the model's parameters that is trained: with LoRA the adapters, else all."""
    return whole[ADAPTERS] if isinstance(model, AdaptedModel) else whole


# Odd constants of MurmurHash3's finalizer, and of Fibonacci hashing.
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_POSITION = 0x9E3779B9


def fingerprint(params: Any, layout: Layout) -> str:
    """A hash of names, shapes, dtypes and values: 32 hexadecimal digits. No array is gathered.

    Each value is mixed with its position; the sums modulo 2^32 do not depend on the order of the additions.
    """
    flat = flatten(params)
    sum_each = jax.jit(lambda flat: jax.tree.map(_of_leaf, flat), out_shardings=layout.replicated)
    sums = jax.device_get(sum_each(flat))
    return digest(_described(path, leaf, sums[path]) for path, leaf in flat.items())


def fingerprint_part(path: str, leaf: jax.Array, layout: Layout) -> str:
    """What `digest` needs of one parameter."""
    return _described(path, leaf, jax.device_get(_summing(layout.replicated)(leaf)))


@functools.cache
def _summing(replicated: Any) -> Any:
    return jax.jit(_of_leaf, out_shardings=replicated)


def digest(parts: Iterable[str]) -> str:
    """The fingerprint of parameters of which these are the parts."""
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=16).hexdigest()


def _described(path: str, leaf: jax.Array, sums: np.ndarray) -> str:
    return f"{path} {leaf.shape} {leaf.dtype} {sums.tolist()}"


def _of_leaf(leaf: jax.Array) -> jax.Array:
    """Two sums over all values, uint32 [2]."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint32)
    position = jnp.uint32(0)
    for dim, size in enumerate(leaf.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim)
    mixed = bits.astype(jnp.uint32) ^ (position * jnp.uint32(_POSITION))
    sums = []
    for factor in _MIX:
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(factor)
        sums.append(jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32))
    return jnp.stack(sums)
