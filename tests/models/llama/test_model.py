"""Llama: the residual stream inside a block, and settings of embeddings, head and positions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick
from pydantic import ValidationError

from lmtrain.models.interface import Documents
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaAttention, LlamaBlock
from lmtrain.models.llama.relatives import relative_of
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError

SIZES = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3, "seq_len": 8}


def test_the_stream_of_a_bfloat16_block_is_rounded_only_at_its_end():
    """Attention and MLP add 0.003 each, less than half of bfloat16's step at 1, 0.0078, and together more."""
    block = LlamaBlock(LlamaConfig(**SIZES, use_bias=True, use_mlp_bias=True), "xla")
    x = jnp.ones((1, 4, 16), jnp.bfloat16)
    shapes = nn.meta.unbox(jax.eval_shape(lambda key: block.init(key, x, 0, True, Documents()), jax.random.key(0)))[
        "params"
    ]
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.bfloat16), shapes)
    for part, layer in (("attn", "out"), ("mlp", "down")):
        params[part][layer]["bias"] += 0.003
    out, _ = jax.jit(lambda p: block.apply({"params": p}, x, 0, True, Documents()))(params)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), 1 + 2**-7)


def test_norm_of_embeddings_bias_and_cap_of_the_head():
    """The logits of the same model with normalized embeddings, plus the bias, below the cap; with a cache, too."""
    sizes = SIZES | {"tie_word_embeddings": False, "pad_vocab_to_multiple_of": 8, "initializer_range": 0.5}
    settings = {"embedding_norm": True, "use_head_bias": True, "final_logit_cap": 2.0, "final_logit_cap_type": "rsqrt"}
    plain, model = (build_model(LlamaConfig(**sizes, **more), 11) for more in ({}, settings))
    params = quick.random_params(model)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8))
    found = jax.jit(lambda p: model.apply({"params": p}, tokens))(params)

    table = params["tokens"]["embedding"]
    table = table / np.sqrt(np.square(table).mean(-1, keepdims=True) + 1e-5) * params["norm_tokens"]["scale"]
    without = {name: part for name, part in params.items() if name != "norm_tokens"}
    without |= {"tokens": {"embedding": table}, "unembed": {"embedding": params["unembed"]["embedding"]}}
    logits = jax.jit(lambda p: plain.apply({"params": p}, tokens))(without) + params["unembed"]["bias"][:11]
    np.testing.assert_allclose(found, 2 * logits / np.sqrt(np.square(logits) + 4), rtol=1e-4, atol=1e-5)

    cache = model.apply({"params": params}, 2, 8, method="empty_cache")
    parts = []
    for begin in (0, 5):
        part = tokens[:, begin : begin + 5]
        more, cache = model.apply({"params": params}, part, cache, begin, method="extend")
        parts.append(more)
    np.testing.assert_allclose(np.concatenate(parts, 1), found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"final_logit_cap_type": "rsqrt"}, "without final_logit_cap"),
        ({"moe": {"gate_limit": 7.0}, "activation_function": "gelu"}, "gate_limit"),
        ({"rope": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor"),
    ],
)
def test_settings_without_effect_are_errors(settings, named):
    with pytest.raises(ValidationError, match=named):
        LlamaConfig(**SIZES, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"embedding_norm": True}, "embedding_norm"),
        ({"use_head_bias": True}, "use_head_bias"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"rope": {"partial_rotary_factor": 0.5}}, "rope.partial_rotary_factor"),
    ],
)
def test_what_transformers_lacks_is_named_by_the_export(settings, named):
    with pytest.raises(UserError, match=named):
        relative_of(LlamaConfig(**SIZES, **settings))


def computed_attention(settings):
    """The output of an attention layer, its input, parameters and config."""
    config = LlamaConfig(**SIZES, **settings)
    layer = LlamaAttention(config, "xla")
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    params = quick.random_like(jax.eval_shape(lambda key: layer.init(key, x, 0, True, Documents()), jax.random.key(0)))
    return jax.jit(lambda p: layer.apply({"params": p}, x, 0, True, Documents()))(params), x, params, config


def test_attention_with_a_gate_is_that_of_transformers():
    import torch
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5TextRotaryEmbedding

    rope = {"theta": 100.0, "partial_rotary_factor": 0.5}
    settings = {"head_dim": 8, "attention_gate": True, "qk_norm": "head", "norm_offset": True, "rope": rope}
    found, x, params, config = computed_attention(settings)
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    theirs = Qwen3_5TextConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_parameters=parameters,
        rms_norm_eps=config.layer_norm_epsilon, attn_implementation="eager",
    )  # fmt: skip
    attention = Qwen3_5Attention(theirs, 0)
    values = {f"{name}_proj.weight": params[name]["kernel"].reshape(16, -1).T for name in "qkv"}
    values["o_proj.weight"] = params["out"]["kernel"].reshape(-1, 16).T
    values |= {f"{name}_norm.weight": params[f"norm_{name}"]["scale"] for name in "qk"}
    attention.load_state_dict({name: torch.tensor(np.array(value)) for name, value in values.items()})
    positions = Qwen3_5TextRotaryEmbedding(theirs)(torch.tensor(x), torch.arange(8)[None].repeat(2, 1))
    mask = torch.full((8, 8), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected, _ = attention(torch.tensor(x), positions, mask)
    np.testing.assert_allclose(found, expected, atol=2e-6 * max(1, float(expected.abs().max())))


@pytest.mark.parametrize(
    "more",
    [
        {"transfer": {"base": {"hidden_dim": 8, "num_layers": 2, "num_heads": 2}}},
        {"optimizer": {"type": "muon", "qk_clip": 1.0}},
    ],
)
def test_what_a_gate_does_not_go_with_is_refused(more):
    with pytest.raises(ValidationError, match="attention_gate"):
        RunConfig(model={"type": "llama", **SIZES, "attention_gate": True}, **more)
