"""Test families: one whose layers differ, and one with auxiliary losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import normal

from lmtrain.models.decoder import Decoder
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.layers.block import Block
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.mlp import LayerNorm
from lmtrain.models.layers.stack import Pattern
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaLM
from lmtrain.models.params import add_auxiliary

VOCAB, LENGTH = 13, 12
RNG = np.random.default_rng(0)
BATCH = {
    "tokens": RNG.integers(0, VOCAB, (16, LENGTH)).astype(np.int32),
    # rows of 0 to 11 targets: no two microbatches have equally many
    "loss_mask": np.arange(LENGTH) < RNG.integers(0, LENGTH, (16, 1)),
    "segments": np.cumsum(RNG.random((16, LENGTH)) < 0.2, axis=1).astype(np.int32),
}


def window_model(num_layers: int = 7, **changes: Any) -> LlamaLM:
    """Llama with a layer with a window, one without positions, and one of global attention, repeated."""
    sizes = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_kv_heads": 2, "seq_len": LENGTH}
    pattern = ["sliding", {"attention": "sliding", "rope": False}, "full"][:num_layers]
    layers = {"num_layers": num_layers, "layer_pattern": pattern, "sliding_window": 3}
    return LlamaLM(LlamaConfig(**sizes, **layers, pad_vocab_to_multiple_of=8, **changes), VOCAB)


def dense_model() -> LlamaLM:
    """Llama, wide enough that errors of rounding average out."""
    sizes = {"hidden_dim": 64, "intermediate_dim": 128, "num_heads": 4, "num_layers": 2, "seq_len": LENGTH}
    return LlamaLM(LlamaConfig(**sizes, pad_vocab_to_multiple_of=8), VOCAB)


def moe_model(num_layers: int = 3, moe: Any = None, **changes: Any) -> LlamaLM:
    """Llama with mixtures of eight experts."""
    sizes = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "seq_len": LENGTH}
    sizes |= {} if "latent_attention" in changes else {"num_kv_heads": 2}
    moe = {"num_experts": 8, "intermediate_dim": 8, "aux_loss": 0.3, "z_loss": 0.2} | (moe or {})
    return LlamaLM(LlamaConfig(**sizes, num_layers=num_layers, moe=moe, pad_vocab_to_multiple_of=8, **changes), VOCAB)


def hybrid_model(num_layers: int = 4, **changes: Any) -> LlamaLM:
    """Llama as Qwen3-Next: Gated DeltaNet in three of four layers, and attention with a gate."""
    sizes = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_kv_heads": 2, "seq_len": LENGTH}
    linear = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 4}
    pattern = {"layer_pattern": ["linear"] * min(3, num_layers - 1) + ["full"], "linear_attention": linear}
    pattern |= {"attention_gate": True, "qk_norm": "head", "norm_offset": True, "rope": {"partial_rotary_factor": 0.5}}
    pattern["layer_norm_epsilon"] = 0.1  # the norm of linear layers divides outputs that can be almost 0
    config = LlamaConfig(**sizes, **pattern, num_layers=num_layers, pad_vocab_to_multiple_of=8, **changes)
    return LlamaLM(config, VOCAB)


# A router that no other test has, in two of three layers.
MIXED = {
    "layer_pattern": ["full", {"attention": "full", "mlp": "dense"}],
    "moe": {
        "router": "sigmoid",
        "experts_per_token": 3,
        "shared_experts": 1,
        "shared_gate": True,
        "bias_update_rate": 0.01,
    },
}

# Latent attention, one MLP before layers with experts in groups.
LATENT = {
    "latent_attention": {
        "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5
    },
    "moe": {"router": "sigmoid", "num_groups": 4, "groups_per_token": 2, "bias_update_rate": 0.01,
            "first_dense_layers": 1, "shared_experts": 1},
    "mtp": {"num_modules": 2},
}  # fmt: skip

SIZE, ROUTED = 0.3, 0.7  # coefficients of the auxiliary losses


class AuxiliaryBlock(Block):
    """x + tanh(x W + b), with two auxiliary losses: a mean over sequences, and one whose weight the model computes."""

    def setup(self) -> None:
        dims = (("embed", self.config.hidden_dim),)
        self.mix = Linear(dims, (("mlp", self.config.hidden_dim),), normal(0.5))

    def __call__(self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Any) -> tuple[jax.Array, None]:
        x = x + jnp.tanh(self.mix(x))
        routed = (x[..., 0] > 0).astype(jnp.float32)
        add_auxiliary(self, "train/size", jnp.square(x).mean((1, 2)).sum(), x.shape[0], SIZE)
        add_auxiliary(self, "train/routed", (routed * x[..., 1] ** 3).sum(), routed.sum(), ROUTED)
        self.sow("metrics", "train/routed_fraction", routed.mean())
        return x, None


class AuxiliaryLM(Decoder):
    """A model of such blocks; with `period` 2 its stack is a pattern of two equal blocks."""

    block = AuxiliaryBlock
    period: int = 1

    @property
    def pattern(self) -> Pattern:
        return Pattern((), (self.config,) * self.period)

    def build_norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_dim, self.config.layer_norm_epsilon)


def auxiliary_model(period: int = 1, **changes: Any) -> AuxiliaryLM:
    sizes = {"hidden_dim": 8, "num_heads": 2, "num_layers": 3, "seq_len": LENGTH, "pad_vocab_to_multiple_of": 8}
    return AuxiliaryLM(Gpt2Config(**sizes | changes), VOCAB, period=period)
