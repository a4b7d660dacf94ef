"""Small models of every family and variant, each with its model type in transformers."""

from typing import Any, NamedTuple

import jax
import numpy as np
from models import quick

from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig

VOCAB = 90  # not a multiple of the padding
LENGTH = 24
SIZES = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": LENGTH}
LLAMA = {"intermediate_dim": 24}
GEMMA = {"scale_embeddings": True, "norm_offset": True, "activation_function": "gelu_new", "tie_word_embeddings": True}
YARN = {"type": "yarn", "factor": 4.0, "original_seq_len": 8, "theta": 1000.0}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_seq_len": 16, "high_freq_factor": 3.0, "theta": 500.0}

GEMMA2 = GEMMA | {
    "norm_position": "both",
    "layer_pattern": ["sliding", "full"],
    "sliding_window": 5,
    "attention_logit_cap": 3.0,
    "final_logit_cap": 4.0,
    "query_pre_attn_scalar": 7,
    "num_kv_heads": 2,
    "num_layers": 3,
}
GEMMA3 = GEMMA | {
    "norm_position": "both",
    "qk_norm": "head",
    "layer_pattern": ["sliding"] * 5 + ["full"],
    "sliding_window": 5,
    "rope": {"theta": 1000.0, "local_theta": 20.0},
    "query_pre_attn_scalar": 7,
    "num_kv_heads": 2,
    "num_layers": 7,
}
OLMO3 = {
    "qk_norm": "all",
    "norm_position": "post",
    "layer_pattern": ["sliding"] * 3 + ["full"],
    "sliding_window": 5,
    "num_kv_heads": 2,
    "num_layers": 5,
}
SMOLLM3 = {"layer_pattern": ["full"] * 3 + [{"attention": "full", "rope": False}], "num_layers": 5, "num_kv_heads": 2}

MOE = {"num_experts": 4, "experts_per_token": 2}
QWEN3_MOE = {
    "qk_norm": "head",
    "head_dim": 16,
    "num_kv_heads": 2,
    "moe": {"num_experts": 5, "experts_per_token": 3, "intermediate_dim": 12},
}

GPT_OSS = {
    "attention_sinks": True,
    "use_bias": True,
    "layer_pattern": ["sliding", "full"],
    "sliding_window": 5,
    "head_dim": 16,
    "num_kv_heads": 2,
    "num_layers": 3,
    "rope": YARN | {"truncate": False, "theta": 150.0},
    "moe": {"num_experts": 5, "experts_per_token": 3, "biases": True, "gate_limit": 0.5},
}

LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
DEEPSEEK = {
    "latent_attention": LATENT | {"q_lora_rank": 10},
    "num_layers": 3,
    "rope": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    "moe": {
        "num_experts": 8,
        "experts_per_token": 3,
        "intermediate_dim": 12,
        "shared_experts": 2,
        "first_dense_layers": 1,
        "num_groups": 4,
        "groups_per_token": 2,
        "routed_scaling_factor": 1.5,
    },
}
DEEPSEEK_V3 = DEEPSEEK | {"moe": DEEPSEEK["moe"] | {"router": "sigmoid", "bias_update_rate": 0.0}}
NO_GROUPS = {"num_groups": None, "groups_per_token": None}

LINEAR = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 10}
# The norm of linear layers divides outputs that can be almost 0: with a small epsilon, rounding alone would be 1e-4.
HYBRID = {
    "layer_norm_epsilon": 0.1,
    "qk_norm": "head",
    "norm_offset": True,
    "attention_gate": True,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope": {"theta": 100.0, "partial_rotary_factor": 0.25},
    "layer_pattern": ["linear", "linear", "linear", "full"],
    "linear_attention": LINEAR,
    "num_layers": 5,
}
SHARED = {"num_experts": 5, "experts_per_token": 3, "intermediate_dim": 12, "shared_experts": 2, "shared_gate": True}
OLMO_LAYERS = [{"attention": "linear", "norm_position": "pre"}] * 2
# transformers 5 writes convolutions in three equal parts, whatever their sizes, so that only these are read as written.
EVEN = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 10, "value_head_dim": 10, "norm_epsilon": 1e-5}
OLMO_HYBRID = {
    "qk_norm": "all",
    "norm_position": "post",
    "layer_pattern": [*OLMO_LAYERS, {"attention": "full", "rope": False}],
    "linear_attention": EVEN | {"negative_eigenvalues": True},
    "num_layers": 5,
    "num_kv_heads": 2,
}

# name: (transformers' model_type, our family, changes to the small model)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt2", "gpt2", {}),
    "gpt2-n_inner": ("gpt2", "gpt2", {"intermediate_dim": 20}),
    "gpt2-mlp_scale": ("gpt2", "gpt2", {"mlp_scale": 2, "layer_norm_epsilon": 0.1}),
    "gpt2-untied": ("gpt2", "gpt2", {"tie_word_embeddings": False}),
    "gpt2-inverse": ("gpt2", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-upcast": ("gpt2", "gpt2", {"upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-relu": ("gpt2", "gpt2", {"activation_function": "relu"}),
    "gpt2-gelu": ("gpt2", "gpt2", {"activation_function": "gelu"}),
    "llama": ("llama", "llama", {}),
    "llama-grouped": ("llama", "llama", {"num_kv_heads": 2, "rope": {"theta": 100.0}}),
    "llama-one-key-head": ("llama", "llama", {"num_kv_heads": 1}),
    "llama-head_dim": ("llama", "llama", {"head_dim": 12, "num_kv_heads": 2}),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", "llama", {"use_bias": True, "use_mlp_bias": True, "layer_norm_epsilon": 0.1}),
    "llama-gelu": ("llama", "llama", {"activation_function": "gelu"}),
    "llama-linear": ("llama", "llama", {"rope": {"type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", "llama", {"rope": {"type": "dynamic", "factor": 2.0, "original_seq_len": LENGTH}}),
    "llama-llama3": ("llama", "llama", {"rope": LLAMA3}),
    "llama-yarn": ("llama", "llama", {"rope": YARN, "head_dim": 16}),
    "mistral": ("mistral", "llama", {"sliding_window": 5, "num_kv_heads": 2}),
    "qwen2": ("qwen2", "llama", {"use_qkv_bias": True, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", "llama", {"qk_norm": "head", "head_dim": 16, "num_kv_heads": 2}),
    "gemma": ("gemma", "llama", {**GEMMA, "head_dim": 16, "num_kv_heads": 1}),
    "olmo2": ("olmo2", "llama", {"qk_norm": "all", "norm_position": "post", "num_kv_heads": 2}),
    "llama-relu2": ("llama", "llama", {"activation_function": "relu2"}),
    "arcee": ("arcee", "llama", {"gated_mlp": False, "activation_function": "relu2", "use_mlp_bias": True}),
    "qwen2-max_window_layers": (
        "qwen2",
        "llama",
        {"use_qkv_bias": True, "layer_pattern": ["full", "full", "sliding"], "sliding_window": 5, "num_layers": 3},
    ),
    "qwen3-layer_types": (
        "qwen3",
        "llama",
        {"qk_norm": "head", "layer_pattern": ["full", "sliding"], "sliding_window": 5, "num_layers": 3},
    ),
    "gemma2": ("gemma2", "llama", GEMMA2),
    "gemma2-without-caps": (
        "gemma2",
        "llama",
        GEMMA2 | {"attention_logit_cap": None, "final_logit_cap": None, "query_pre_attn_scalar": None},
    ),
    "gemma3": ("gemma3_text", "llama", GEMMA3),
    "gemma3-linear": (
        "gemma3_text",
        "llama",
        GEMMA3 | {"rope": {"type": "linear", "factor": 8.0, "theta": 500.0, "local_theta": 20.0}, "num_layers": 6},
    ),
    "olmo3": ("olmo3", "llama", OLMO3),
    "olmo3-yarn": ("olmo3", "llama", OLMO3 | {"rope": YARN | {"local_theta": 1000.0}, "head_dim": 16}),
    "smollm3": ("smollm3", "llama", SMOLLM3),
    "smollm3-windows": (
        "smollm3",
        "llama",
        SMOLLM3 | {"layer_pattern": ["full", {"attention": "sliding", "rope": False}], "sliding_window": 5},
    ),
    "mixtral": ("mixtral", "llama", {"moe": MOE, "num_kv_heads": 2}),
    "mixtral-windows": ("mixtral", "llama", {"moe": MOE | {"router": "topk_softmax"}, "sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", "llama", QWEN3_MOE),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        "llama",
        QWEN3_MOE | {"layer_pattern": ["full", {"attention": "full", "mlp": "dense"}], "num_layers": 3},
    ),
    "olmoe": ("olmoe", "llama", {"qk_norm": "all", "moe": MOE | {"num_experts": 6, "normalize": False}}),
    "qwen2_moe": ("qwen2_moe", "llama", {"use_qkv_bias": True, "moe": SHARED | {"normalize": False}}),
    "qwen3_next": ("qwen3_next", "llama", HYBRID | {"moe": SHARED | {"normalize": False}}),
    "qwen3_next-mixed": (
        "qwen3_next",
        "llama",
        HYBRID | {"layer_pattern": ["linear", {"attention": "full", "mlp": "dense"}], "moe": SHARED, "use_bias": True},
    ),
    "qwen3_5": ("qwen3_5_text", "llama", HYBRID),
    "qwen3_5-tied": (
        "qwen3_5_text",
        "llama",
        HYBRID | {"tie_word_embeddings": True, "linear_attention": LINEAR | {"num_key_heads": 4}},
    ),
    "olmo_hybrid": ("olmo_hybrid", "llama", OLMO_HYBRID),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        "llama",
        OLMO_HYBRID
        | {
            "layer_pattern": [*OLMO_LAYERS, "full"],
            "linear_attention": EVEN | {"num_value_heads": 4, "value_head_dim": 5},
        },
    ),
    "gpt_oss": ("gpt_oss", "llama", GPT_OSS),
    "gpt_oss-no_biases": ("gpt_oss", "llama", GPT_OSS | {"use_bias": False, "rope": {}, "layer_pattern": None}),
    "deepseek_v2": ("deepseek_v2", "llama", DEEPSEEK | {"moe": DEEPSEEK["moe"] | {"normalize": False}}),
    "deepseek_v2-lite": (
        "deepseek_v2",
        "llama",
        DEEPSEEK | {"latent_attention": LATENT, "moe": DEEPSEEK["moe"] | {"normalize": False} | NO_GROUPS},
    ),
    "deepseek_v3": ("deepseek_v3", "llama", DEEPSEEK_V3),
    "deepseek_v3-halves": (
        "deepseek_v3",
        "llama",
        DEEPSEEK_V3 | {"latent_attention": LATENT | {"rope_interleave": False}, "rope": {}, "use_bias": True},
    ),
    "mpt": ("mpt", "mpt", {}),
    "mpt-6-heads": ("mpt", "mpt", {"hidden_dim": 24, "num_heads": 6}),
    "mpt-clip": ("mpt", "mpt", {"clip_qkv": 0.5, "layer_norm_epsilon": 0.1}),
    "mpt-softmax_scale": ("mpt", "mpt", {"softmax_scale": 0.9, "num_heads": 2}),
    "mpt-untied": ("mpt", "mpt", {"tie_word_embeddings": False}),
    "backpack": ("backpack-gpt2", "backpack", {"num_senses": 4}),
    "backpack-divided": ("backpack-gpt2", "backpack", {"num_senses": 8, "divide_by_num_senses": True}),
    "backpack-n_inner": (
        "backpack-gpt2",
        "backpack",
        {"num_senses": 2, "intermediate_dim": 20, "sense_intermediate_scale": 2, "activation_function": "relu"},
    ),
}

TOKENIZER = Tokenizer(path="none", library=None, vocab_size=VOCAB, eos_id=1, bos_id=0, fingerprint="none")


class Variant(NamedTuple):
    """A model with random parameters, including norms and biases: with initial values wrong code could pass."""

    kind: str
    run_config: RunConfig
    model: Any
    params: Any

    @property
    def config(self):
        return self.run_config.model

    def logits(self, tokens) -> np.ndarray:
        return np.asarray(jax.jit(self.model.apply)({"params": self.params}, tokens))


def make(name: str, vocab_size: int = VOCAB, **more: Any) -> Variant:
    kind, family, changes = VARIANTS[name]
    sizes = SIZES | (LLAMA if family == "llama" else {})
    settings = {"type": family, "gradient_checkpointing": False} | sizes | changes | more
    run_config = RunConfig.model_validate({"model": settings})
    model = build_model(run_config.model, vocab_size)
    return Variant(kind, run_config, model, quick.random_params(model, seed=7))


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (2, LENGTH))
