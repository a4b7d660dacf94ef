"""Llama and each of its relatives, with every parameter random, is the same function in transformers."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lmtrain.config.errors import UserError
from lmtrain.hf.export import write_hf_folder
from lmtrain.hf.key_map import flatten, from_hf, to_hf
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.hf import model_type, table, to_hf_config
from lmtrain.models.llama.model import LlamaLM
from lmtrain.train.loss import next_token_targets, summed_cross_entropy

SIZES = {"hidden_dim": 32, "intermediate_dim": 40, "num_heads": 4, "num_layers": 2, "seq_len": 24}
VOCAB = 384
GEMMA = {"scale_embeddings": True, "norm_offset": True, "activation_function": "gelu_new", "tie_word_embeddings": True}
YARN = {"type": "yarn", "factor": 4.0, "original_seq_len": 8, "theta": 1000.0}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_seq_len": 16, "high_freq_factor": 3.0, "theta": 500.0}

VARIANTS = {
    "llama": ("llama", {}),
    "grouped": ("llama", {"num_kv_heads": 2, "theta": 100.0}),
    "one key head": ("llama", {"num_kv_heads": 1}),
    "head_dim": ("llama", {"head_dim": 12, "num_kv_heads": 2}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"use_bias": True, "use_mlp_bias": True, "layer_norm_epsilon": 0.1}),
    "gelu": ("llama", {"activation_function": "gelu"}),
    "linear": ("llama", {"rope": {"type": "linear", "factor": 3.0}}),
    "dynamic": ("llama", {"rope": {"type": "dynamic", "factor": 2.0}}),
    "llama3": ("llama", {"rope": LLAMA3}),
    "yarn": ("llama", {"rope": YARN, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 5, "num_kv_heads": 2}),
    "qwen2": ("qwen2", {"use_qkv_bias": True, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"qk_norm": "head", "head_dim": 16, "num_kv_heads": 2}),
    "gemma": ("gemma", {**GEMMA, "head_dim": 16, "num_kv_heads": 1}),
    "olmo2": ("olmo2", {"qk_norm": "all", "norm_position": "post", "num_kv_heads": 2}),
}


def make(changes):
    changes = dict(changes)
    if "theta" in changes:
        changes["rope"] = {"theta": changes.pop("theta")}
    config = LlamaConfig(**SIZES | changes)
    lm = LlamaLM(config, VOCAB)
    shapes = nn.meta.unbox(jax.eval_shape(lm.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32)))["params"]
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda p: (rng.normal(size=p.shape) * 0.3).astype(np.float32), shapes)
    return config, lm, params, shapes


def tokens():
    return np.random.default_rng(3).integers(0, VOCAB, (2, 24))


@pytest.fixture
def theirs(tmp_path, settings):
    """`theirs(config, params)` exports and loads in transformers, which must find every tensor it wants."""

    def load(config, params):
        tokenizer = load_tokenizer(settings["data"]["tokenizer"])
        hf_config = to_hf_config(config, VOCAB, tokenizer.eos_id, tokenizer.bos_id)
        write_hf_folder(str(tmp_path / "hf"), to_hf(table(config), params), hf_config, tokenizer, "float32")
        model, loading = AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(loading.values()), loading
        return model.eval()

    return load


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree(theirs, variant):
    kind, changes = VARIANTS[variant]
    config, lm, params, _ = make(changes)
    model = theirs(config, params)
    assert model.config.model_type == kind
    ours = np.asarray(lm.apply({"params": params}, tokens()))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens())).logits.numpy()
    assert np.abs(expected).max() > 1
    assert np.abs(ours - expected).max() < 1e-4


@pytest.mark.parametrize("variant", ["grouped", "gemma", "olmo2", "mistral"])
def test_loss_and_every_gradient_agree(theirs, variant):
    config, lm, params, _ = make(VARIANTS[variant][1])
    model = theirs(config, params)
    ids = tokens()
    mask = np.broadcast_to(np.arange(24) < 23, ids.shape)

    def loss(p):
        hidden = lm.apply({"params": p}, ids, True, method="hidden")
        head = lm.apply({"params": p}, method="head")
        return summed_cross_entropy(hidden, head, next_token_targets(ids), mask) / mask.sum()

    ours, gradients = jax.jit(jax.value_and_grad(loss))(params)
    expected = model(torch.from_numpy(ids), labels=torch.from_numpy(ids)).loss
    expected.backward()
    assert float(ours) == pytest.approx(expected.item(), rel=1e-5)
    found = dict(model.named_parameters())
    for name, gradient in to_hf(table(config), jax.device_get(gradients)).items():
        other = found[name].grad.numpy()
        assert np.abs(gradient - other).max() < 1e-4 * max(1, np.abs(other).max()), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_round_trip_gives_every_bit_back(variant):
    config, _, params, shapes = make(VARIANTS[variant][1])
    back = from_hf(table(config), to_hf(table(config), params), shapes, config.num_layers)
    for name, value in flatten(params).items():
        assert flatten(back)[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("variant", ["grouped", "mistral", "qwen3", "olmo2", "yarn"])
def test_extending_a_cache_equals_the_full_forward(variant):
    _, lm, params, _ = make(VARIANTS[variant][1])
    full = lm.apply({"params": params}, tokens())
    extend = jax.jit(lambda ids, cache, start: lm.apply({"params": params}, ids, cache, start, method="extend"))
    cache = lm.apply({"params": params}, 2, 30, method="empty_cache")
    logits, start = [], 0
    for size in (7, 1, 16):
        out, cache = extend(tokens()[:, start : start + size], cache, start)
        logits.append(out)
        start += size
    np.testing.assert_allclose(np.concatenate(logits, axis=1), full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_norm": "head", "norm_position": "post"}, "model.qk_norm: head, model.norm_position: post"),
        ({"scale_embeddings": True}, "model.scale_embeddings: True"),
        ({"sliding_window": 4, "use_bias": True}, "model.use_bias"),
        ({"qk_norm": "head", "use_mlp_bias": True}, "model.use_mlp_bias"),
        ({"rope": {"type": "dynamic", "factor": 2.0, "original_seq_len": 8}}, "model.rope.original_seq_len"),
    ],
)
def test_what_transformers_does_not_have_is_refused_by_name(changes, named):
    config, *_ = make(changes)
    with pytest.raises(UserError, match=named):
        model_type(config)


def test_config_json_is_readable_by_both_versions_of_transformers():
    config, *_ = make({"rope": LLAMA3})
    values = json.loads(json.dumps(to_hf_config(config, VOCAB, 2, 1)))
    assert values["rope_parameters"]["rope_theta"] == values["rope_theta"] == 500.0
    assert values["rope_scaling"]["rope_type"] == "llama3"
