"""A model with adapters, with the interface of every model: evaluation and sampling use it like any other."""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from lmtrain.lora.adapters import init_adapters, trained_in_full
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
from lmtrain.models.interface import LanguageModel
from lmtrain.models.layers.linear import LORA, RATE
from lmtrain.models.layers.quantized import QUANTIZED
from lmtrain.models.params import abstract_params, flatten, shapes_by_path, unflatten
from lmtrain.models.quantization import take_scales
from lmtrain.models.registry import hf_family

# The parts of the parameters.
BASE, ADAPTERS = "base", "adapters"


@dataclass(frozen=True)
class AdaptedModel:
    """`inner` with adapters on the layers `sites`; the parameters at the paths `in_full` are trained in full.

    Its parameters are {"base": those of `inner`, "adapters": see `lmtrain/lora/adapters.py`}. The adapters' outputs are
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
    def has_windows(self) -> bool:
        return self.inner.has_windows

    @property
    def logit_cap(self) -> float | None:
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
        base, scales = take_scales(parts[BASE])
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
        everything = {**variables, "params": base, LORA: unflatten(flat)}
        if scales:
            everything[QUANTIZED] = unflatten(flatten(scales) | flatten(variables.get(QUANTIZED, {})))
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
    adapted: Any = AdaptedModel(model, tuple(sites), in_full, config.r, config.scale, config.dropout)
    return cast(LanguageModel, adapted)  # its other methods are those of `inner`, called through `apply`


def trainable(model: LanguageModel, whole: Any) -> Any:
    """The part of a tree like the model's parameters that is trained: with LoRA the adapters, else all."""
    return whole[ADAPTERS] if isinstance(model, AdaptedModel) else whole
