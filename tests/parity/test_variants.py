"""Every family and variant, with random parameters, has the same outputs in transformers, exported and imported."""

import json
import logging

import jax
import numpy as np
import pytest
import torch
from hf_tensors import to_hf
from models import quick
from parity.variants import LENGTH, LINEAR, VARIANTS, VOCAB, YARN, make, tokens
from safetensors.numpy import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MixtralConfig,
    MixtralForCausalLM,
)

from lmtrain.generation.decode import SamplingSettings, sample
from lmtrain.models.gated_delta.hf import QWEN3_5
from lmtrain.models.interface import Documents, outputs_of
from lmtrain.models.llama.relatives import RELATIVES, relative_of
from lmtrain.models.params import flatten
from lmtrain.models.registry import build_model, hf_family
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.runtime.errors import UserError
from lmtrain.weights.hf_config import config_of
from lmtrain.weights.load_hf import load_hf_params

# One of each kind of block. The others are marked long; test_fixtures.py compares all kinds of files.
NOT_LONG = {"gpt2", "llama-grouped", "gemma2", "olmo3-yarn", "qwen3_next", "olmo_hybrid", "mpt-6-heads", "backpack"}
NOT_LONG |= {"gpt_oss", "deepseek_v3"}


def mark_long(names, suite=NOT_LONG):
    return [name if name in suite else pytest.param(name, marks=pytest.mark.long) for name in names]


# Most of the random sizes are tested before a release.
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.release) for seed in range(4, 20))]


@pytest.mark.parametrize("name", mark_long(VARIANTS))
def test_logits_agree(in_torch, name):
    variant = make(name)
    theirs = in_torch(variant)
    assert theirs.config.model_type == variant.kind
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens())).logits.numpy()
    assert expected.shape[-1] == VOCAB
    assert np.abs(expected).max() > 1
    error = np.abs(variant.logits(tokens()) - expected).max()
    print(f"{name}: {error:.2g}")
    assert error < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_of_hybrids_of_random_sizes_agree(in_torch, seed):
    """Every size that changes the layout of weights: heads, widths, taps, period, depth, experts."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    name = ["qwen3_next", "qwen3_5", "olmo_hybrid", "qwen3_next-mixed"][seed % 4]
    changes, keys = VARIANTS[name][2], one_of(1, 2, 3)
    sizes = {"num_key_heads": keys, "num_value_heads": keys * one_of(1, 2, 3), "conv_kernel_dim": one_of(2, 3, 4, 5)}
    sizes |= {"key_head_dim": one_of(3, 8, 10), "value_head_dim": one_of(4, 7, 16)}
    *linear, attention = changes["layer_pattern"]
    more = {"layer_pattern": linear[:1] * one_of(1, 2, 3) + [attention], "num_layers": one_of(4, 5, 6)}
    more |= {"linear_attention": changes["linear_attention"] | sizes, "num_kv_heads": one_of(1, 2, 4)}
    if "moe" in changes:
        more["moe"] = changes["moe"] | {"num_experts": one_of(4, 6), "shared_experts": one_of(1, 3)}
    variant = make(name, **more)
    with torch.no_grad():
        expected = in_torch(variant)(torch.from_numpy(tokens())).logits.numpy()
    error = np.abs(variant.logits(tokens()) - expected).max()
    print(f"{name} {more}: {error:.2g} of {np.abs(expected).max():.2g}")
    assert error < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["deepseek", "gpt_oss"])
def test_logits_of_latent_attention_and_of_sinks_agree_for_random_sizes(in_torch, kind, seed):
    """Widths, latents, groups, shared and dense parts, windows, biases, both factors of YaRN."""
    rng = np.random.default_rng(seed)

    def one_of(*values):
        return values[rng.integers(len(values))]

    rope = YARN | {"factor": one_of(2.0, 8.0)}
    if kind == "gpt_oss":
        name = ["gpt_oss", "gpt_oss-no_biases"][seed % 2]
        moe = VARIANTS[name][2]["moe"] | {"num_experts": one_of(4, 7), "gate_limit": one_of(0.3, 7.0)}
        more = {"head_dim": one_of(4, 10), "sliding_window": one_of(2, 9), "num_kv_heads": one_of(1, 2, 4)}
        more |= {"rope": one_of({}, rope, rope | {"truncate": False}), "num_layers": one_of(2, 3)}
    else:
        name = ["deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "deepseek_v3-halves"][seed % 4]
        groups = one_of((2, 1), (4, 3), (None, None))
        sizes = {"num_groups": groups[0], "groups_per_token": groups[1], "num_experts": one_of(8, 12)}
        sizes |= {"shared_experts": one_of(1, 2), "first_dense_layers": one_of(0, 1, 2), "routed_scaling_factor": 0.7}
        moe = VARIANTS[name][2]["moe"] | sizes
        if moe.get("router") == "sigmoid":
            moe["normalize"] = one_of(True, False)
        latent = {"kv_lora_rank": one_of(6, 16), "qk_nope_head_dim": one_of(4, 8), "v_head_dim": one_of(2, 12)}
        latent |= {"qk_rope_head_dim": one_of(2, 6)}
        if "v3" in name:  # transformers needs even widths of version 2
            latent["qk_nope_head_dim"] -= 1
        more = {"latent_attention": VARIANTS[name][2]["latent_attention"] | latent, "use_bias": one_of(True, False)}
        scales = one_of({}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 0.5})
        more |= {"rope": one_of({}, rope | scales, rope | {"mscale_all_dim": 0.8})}
    variant = make(name, moe=moe, **more)
    with torch.no_grad():
        expected = in_torch(variant)(torch.from_numpy(tokens())).logits.numpy()
    error = np.abs(variant.logits(tokens()) - expected).max()
    print(f"{name} {more} {moe}: {error:.2g} of {np.abs(expected).max():.2g}")
    assert error < 1e-4


TEXT = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 16}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.01, "max_position_embeddings": LENGTH}
TEXT |= {f"linear_{name}": value for name, value in LINEAR.items()}
ROPE = {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
SPARSE = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_tok": 3,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}


@pytest.mark.parametrize("kind", ["qwen3_5_moe", pytest.param("qwen3_5", marks=pytest.mark.long)])
def test_the_text_part_of_a_model_of_text_and_images_is_read(tmp_path, layout, kind):
    text = TEXT | {"rope_parameters": ROPE} | (SPARSE if kind == "qwen3_5_moe" else {})
    values = AutoConfig.for_model(kind, text_config=text, vision_config=VISION | {"num_position_embeddings": 16})
    theirs = AutoModelForImageTextToText.from_config(values).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        expected = theirs(torch.from_numpy(tokens())).logits.numpy()
    theirs.save_pretrained(tmp_path)
    config = config_of(str(tmp_path)).model
    assert RELATIVES[relative_of(config)].linear is QWEN3_5
    model = build_model(config, VOCAB)
    params = load_hf_params(str(tmp_path), config, model, layout, "float32")
    assert np.abs(jax.jit(model.apply)({"params": params}, tokens()) - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.5


@pytest.mark.parametrize("name", mark_long(VARIANTS))
def test_an_export_is_imported_with_the_same_settings_and_bits(export, layout, name):
    variant = make(name)
    folder = export(variant, shard_bytes=4000)
    config = config_of(folder).model
    back = load_hf_params(folder, config, variant.model, layout, "float32")
    assert config.meaning() == variant.config.meaning()
    there, here = flatten(jax.device_get(back)), flatten(variant.params)
    assert there.keys() == here.keys()
    for path, value in here.items():
        kept = len(value) if "embedding" not in path or "positions" in path else VOCAB
        assert there[path][:kept].tobytes() == value[:kept].tobytes(), path
        assert not there[path][kept:].any()


@pytest.mark.parametrize("name", mark_long(["gpt2", "llama-grouped"], {"gpt2"}))
def test_logits_agree_where_positions_restart_and_attention_does_not(in_torch, name):
    variant = make(name)
    ids = tokens()
    positions = np.concatenate([np.arange(10), np.arange(ids.shape[1] - 10)]) * np.ones((2, 1), int)
    # without a mask, transformers treats restarting positions as packed documents
    everywhere = torch.ones(ids.shape, dtype=torch.int64)
    with torch.no_grad():
        expected = in_torch(variant)(
            torch.from_numpy(ids), position_ids=torch.from_numpy(positions), attention_mask=everywhere
        ).logits.numpy()

    def logits(model, ids):
        return model.logits(model.hidden(ids, True, Documents(positions=positions)))

    found = jax.jit(lambda params: variant.model.apply(params, ids, method=logits))({"params": variant.params})
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(variant.logits(ids) - expected).max() > 0.1


DIFFERENT = ["qwen2-max_window_layers", "qwen3-layer_types", "gemma2", "gemma3", "olmo3", "smollm3", "smollm3-windows"]
DIFFERENT += ["gpt_oss", "deepseek_v2", "deepseek_v3"]


@pytest.mark.parametrize("name", mark_long(["mistral", *DIFFERENT], {"gemma3"}))
def test_logits_of_packed_documents_agree(in_torch, name):
    """transformers finds documents by their positions, which start again; they are longer than the window."""
    variant, ids, length = make(name), tokens(), 10
    positions = np.concatenate([np.arange(length), np.arange(ids.shape[1] - length)])[None]
    segments = np.broadcast_to(np.arange(ids.shape[1]) >= length, ids.shape).astype(np.int32)
    documents = {"position_ids": torch.from_numpy(positions), "use_cache": False}
    if name == "gpt_oss":  # that of transformers leaves the positions out
        documents["attention_mask"] = {kind: torch.from_numpy(mask) for kind, mask in masks(segments[0], 5).items()}
    with torch.no_grad():
        theirs = in_torch(variant)
        expected = theirs(torch.from_numpy(ids), **documents).logits

    def logits(model, ids):
        return model.logits(model.hidden(ids, True, Documents(segments, positions)))

    found = jax.jit(lambda params: variant.model.apply(params, ids, method=logits))({"params": variant.params})
    assert np.abs(found - expected.numpy()).max() < 1e-4
    assert np.abs(variant.logits(ids) - expected.numpy()).max() > 0.1


def masks(segments: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """What is added to scores [1, 1, S, S] of documents, by the kind of the layer."""
    ago = np.subtract.outer(np.arange(len(segments)), np.arange(len(segments)))
    seen = (ago >= 0) & np.equal.outer(segments, segments)
    seen_by = {"full_attention": seen, "sliding_attention": seen & (ago < window)}
    return {kind: np.where(see, 0, -np.inf).astype(np.float32)[None, None] for kind, see in seen_by.items()}


HYBRIDS = ["qwen3_next", "qwen3_5", "olmo_hybrid"]


@pytest.mark.parametrize("name", mark_long(["mistral", *DIFFERENT, *HYBRIDS], {"gemma2", "qwen3_5"}))
def test_greedy_text_beyond_the_window_is_that_of_transformers(in_torch, name):
    variant = make(name, tie_word_embeddings=False)  # tied models with random parameters repeat their input
    prompt = tokens()[:1, :7]
    with torch.no_grad():
        expected = in_torch(variant).generate(
            torch.from_numpy(prompt), do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0
        )
    settings = SamplingSettings(max_new_tokens=16, temperature=0)
    found = sample(variant.model, variant.params, prompt[0], jax.random.key(0), settings, None)
    assert found == expected[0, 7:].tolist()
    assert len(set(found)) > 1


GRADIENTS = ["gpt2", "gpt2-untied", "llama-grouped", "mistral", "gemma", "olmo2", "qwen3", "arcee"]
GRADIENTS += [*DIFFERENT, *HYBRIDS, "mpt-clip", "backpack-divided"]


@pytest.mark.parametrize("name", mark_long(GRADIENTS, {"gemma2", "backpack-divided"}))
def test_loss_and_every_gradient_agree(in_torch, tmp_path, name):
    variant = make(name)
    theirs = in_torch(variant).double()
    theirs.set_experts_implementation("eager")  # the only one with float64
    ids = tokens()
    mask = np.broadcast_to(np.arange(ids.shape[1]) < ids.shape[1] - 1, ids.shape)

    def loss(params):
        batch = {"tokens": ids, "loss_mask": mask}
        outputs = variant.model.apply({"params": params}, batch, True, method=outputs_of)
        return CrossEntropy().loss_sum(outputs, batch).total / mask.sum()

    ours, gradients = jax.jit(jax.value_and_grad(loss))(variant.params)
    expected = theirs(torch.from_numpy(ids), labels=torch.from_numpy(ids)).loss
    expected.backward()
    assert float(ours) == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
        for buffer in theirs.buffers():  # the bias of a router has no gradient
            buffer.zero_()
    theirs.save_pretrained(tmp_path / "gradients")  # under the names of files, which modules do not always have
    found = load_file(tmp_path / "gradients" / "model.safetensors")
    table = hf_family(variant.config.type).table(variant.config)
    mapped = to_hf(table, jax.device_get(gradients), variant.config.num_layers, VOCAB)
    for name in mapped.keys() - found.keys():  # transformers 5 writes another name for this norm
        found[name] = found.pop(name.replace("post_attention_layernorm", "feedforward_layer_norm"))
    assert mapped.keys() == found.keys()
    for name, gradient in mapped.items():
        other = found[name]
        assert np.abs(gradient - other).max() < 1e-4 * max(1, np.abs(other).max()), name


def test_an_imported_mixture_minimizes_the_loss_of_transformers(tmp_path, layout):
    """With its balancing loss, over one sequence and layer, since lmtrain balances each sequence and layer. The last
    token, which has no target, is masked."""
    values = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
    )
    theirs = MixtralForCausalLM(values).float()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    ids = torch.from_numpy(tokens()[:1].astype(np.int64))
    mask = torch.arange(ids.shape[1])[None] < ids.shape[1] - 1
    theirs(ids, attention_mask=mask.long(), labels=ids).loss.backward()

    config = config_of(str(tmp_path)).model
    model = build_model(config, VOCAB)
    state = quick.new_state(load_hf_params(str(tmp_path), config, model, layout, "float32"))
    batch = {"tokens": ids.numpy().astype(np.int32), "loss_mask": mask.numpy()}
    gradients = quick.build_step(model)(state, batch)[0].opt_state[0].trace
    mapped = to_hf(hf_family(config.type).table(config), jax.device_get(gradients), 1, VOCAB)
    found = {name.replace(".mlp.gate", ".block_sparse_moe.gate"): p for name, p in theirs.named_parameters()}
    shared = mapped.keys() & found.keys()
    assert len(shared) >= 10  # all but the experts, which transformers 5 stacks
    for name in shared:
        expected = found[name].grad.numpy()
        assert np.linalg.norm(mapped[name] - expected) < 1e-4 * np.linalg.norm(expected), name


@pytest.mark.parametrize(
    "name",
    mark_long(
        ["gpt2", "llama-grouped", "llama-yarn", "mistral", "qwen3", "olmo2", "deepseek_v3", "mpt-6-heads", "backpack"],
        {"llama-grouped", "deepseek_v3", "mpt-6-heads", "backpack"},
    ),
)
def test_extending_a_cache_equals_the_full_forward(name):
    variant = make(name)
    params = {"params": variant.params}
    extend = jax.jit(lambda ids, cache, start: variant.model.apply(params, ids, cache, start, method="extend"))
    cache = variant.model.apply(params, 2, 30, method="empty_cache")
    logits, start = [], 0
    for size in (7, 1, 16):
        out, cache = extend(tokens()[:, start : start + size], cache, start)
        logits.append(out)
        start += size
    np.testing.assert_allclose(np.concatenate(logits, axis=1), variant.logits(tokens()), rtol=1e-4, atol=1e-4)


def test_without_biases_the_export_has_zeros_and_the_import_has_none(in_torch, export, layout):
    variant = make("gpt2", use_bias=False)
    with torch.no_grad():
        expected = in_torch(variant)(torch.from_numpy(tokens())).logits.numpy()
    assert np.abs(variant.logits(tokens()) - expected).max() < 1e-4
    back = load_hf_params(export(variant), variant.config, variant.model, layout, "float32")
    assert flatten(back).keys() == flatten(variant.params).keys()
    with_biases = export(make("gpt2"), folder="with_biases")
    with pytest.raises(UserError, match=r"ln_f\.bias .*use_bias"):
        load_hf_params(with_biases, variant.config, variant.model, layout, "float32")


@pytest.mark.parametrize("name", ["gpt2-inverse", "gemma2"])
def test_transformers_computes_attention_in_the_way_that_supports_the_setting(export, name):
    """Other attention implementations of version 4 omit GPT-2's division, and Gemma 2's cap."""
    folder = export(make(name))
    with open(f"{folder}/config.json") as file:
        assert json.load(file)["_attn_implementation"] == "eager"  # the name that version 4 reads
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert loaded.config._attn_implementation == "eager"
    plain = AutoModelForCausalLM.from_pretrained(export(make("gpt2"), folder="plain"), dtype=torch.float32)
    assert plain.config._attn_implementation == "sdpa"


STRAY = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "use_qkv_bias": True}


@pytest.mark.parametrize("name", mark_long(["llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2"], {"qwen2"}))
def test_keys_of_other_kinds_have_the_effect_that_they_have_in_transformers(export, layout, name):
    variant = make(name)
    folder = export(variant)
    with open(f"{folder}/config.json") as file:
        values = json.load(file)
    more = STRAY | ({} if name == "llama" else {"mlp_bias": True})
    with open(f"{folder}/config.json", "w") as file:
        json.dump(values | more, file)
    config = config_of(folder).model
    model = build_model(config, VOCAB, "xla")
    params = load_hf_params(folder, config, model, layout, "float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens())).logits.numpy()
    found = np.asarray(jax.jit(model.apply)({"params": params}, tokens()))[..., :VOCAB]
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("name", ["llama-grouped", "gpt2"])
def test_generate_of_transformers_warns_of_nothing_and_stops_where_positions_end(in_torch, caplog, name):
    """GPT-2 has no position after `seq_len` 24; other models get no `max_length`, next to which generate warns."""
    theirs = in_torch(make(name))
    prompt = torch.from_numpy(tokens()[:1, :20])
    more = {} if theirs.generation_config.max_length else {"max_new_tokens": 4}
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        found = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, eos_token_id=None, **more
        )
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert found.shape[1] == 24
    assert caplog.messages == []
