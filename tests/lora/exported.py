"""Exports of a model with random adapters."""

from typing import Any

import jax
import numpy as np
from conftest import TOKENIZER
from flax.linen import meta
from models import quick

from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.lora.model import ADAPTERS, BASE, adapt
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.program.program import Program
from lmtrain.weights.load_checkpoint import gather_merged, gather_tensors
from lmtrain.weights.load_hf import load_peft_adapter
from lmtrain.weights.write_export import build_adapter_export, build_export, write_export

LENGTH = 16


SIZES = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": LENGTH, "gradient_checkpointing": False}


FAMILIES = {"gpt2": {}, "llama": {"num_kv_heads": 2, "intermediate_dim": 24}, "mpt": {}, "backpack": {"num_senses": 4}}


def config_of(family, model, lora, ref="base"):
    settings = {"type": family, **SIZES, **FAMILIES[family], **model}
    return RunConfig.model_validate(
        {"model": settings, "initialize_from_hf": ref, "lora": {"r": 4, "alpha": 24, **lora}}
    )


def random_adapters(model):
    """Adapters in which both matrices are random, and random tables."""
    leaves, tree = jax.tree.flatten(meta.unbox(abstract_params(model)[ADAPTERS]))
    rng = np.random.default_rng(3)
    return jax.tree.unflatten(tree, [rng.normal(0, 0.2, leaf.shape).astype(np.float32) for leaf in leaves])


class Exported:
    """A random base with random adapters, exported to `base`, `adapter` and `merged` in a folder."""

    def __init__(self, folder, family, model, lora):
        self.folder = folder
        self.config = config_of(family, model, lora, str(folder / "base"))
        self.tokenizer, self.layout = load_tokenizer(str(TOKENIZER)), build_layout(PartitioningConfig())
        inner = build_model(self.config.model, self.tokenizer.vocab_size)
        self.model = adapt(self.config.lora, self.config.model, inner)
        self.params = {BASE: quick.random_params(inner, seed=7), ADAPTERS: random_adapters(self.model)}
        base = build_export(self.config.model, inner, self.tokenizer, "float32")
        size = inner.vocab_size
        write_export(str(folder / "base"), base, gather_tensors(self.params[BASE], base.pieces, self.layout, size))
        merged = gather_merged(self.params, self.model, base.pieces, self.layout)
        write_export(str(folder / "merged"), base, merged)
        plan = build_adapter_export(
            self.config, self.model, self.tokenizer, "float32", None, self.config.initialize_from_hf
        )
        values = gather_tensors(self.params[ADAPTERS], plan.pieces, self.layout, size)
        write_export(str(folder / "adapter"), plan, values)

    def reading(self, folder):
        """The config of a run that starts from the adapters in a folder."""
        lora = self.config.lora.model_copy(update={"initialize_from": str(self.folder / folder)})
        return self.config.model_copy(update={"lora": lora})

    def tokens(self):
        return np.random.default_rng(0).integers(0, self.model.vocab_size, (2, LENGTH))

    def logits(self, params=None):
        logits = jax.jit(self.model.apply)({"params": params or self.params}, self.tokens())
        return np.asarray(logits)[..., : self.model.vocab_size]


def load_adapter(program: Program, ref: str) -> Any:
    return load_peft_adapter(program.config, program.model, program.layout, ref)
