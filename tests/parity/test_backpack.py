"""A Backpack with random parameters has the same outputs in the modeling file of its export."""

import functools
import json
import logging
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
from hf_tensors import to_hf
from models import quick
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from lmtrain.generation.decode import SamplingSettings, sample
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.backpack.hf import extra_files, table, to_hf_config
from lmtrain.models.backpack.model import BackpackLM

SIZES = {"hidden_dim": 32, "num_heads": 4, "num_layers": 2, "seq_len": 24, "num_senses": 4}
VOCAB = 384
PADDED = {"pad_vocab_to_multiple_of": 100}  # 400 rows, the last 16 random too: they must have no effect
QUICK = {"gradient_checkpointing": False, "scan_layers": False}  # compiles sooner

# `test_variants.py` has others
VARIANTS = {
    "default": {"gradient_checkpointing": True, "scan_layers": True},
    "no biases, unscaled layers": {
        "use_bias": False,
        "scale_attn_by_inverse_layer_idx": False,
        "upcast_attn": True,
        "layer_norm_epsilon": 0.1,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory):
    """transformers copies a model's code before running it, here to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", list(sys.path))  # transformers adds the folder
        yield


def make(**changes):
    """Our model and its parameters, with sense weights and positions large enough to matter."""
    config = BackpackConfig(**SIZES | PADDED | QUICK | changes)
    lm = BackpackLM(config, VOCAB)
    params = quick.random_params(lm, 0.3, seed=7)
    params["weigh"]["kernel"] *= 5
    params["positions"]["embedding"] *= 10
    return lm, params


def tokens():
    return np.random.default_rng(3).integers(0, VOCAB, (2, 24))


@functools.partial(jax.jit, static_argnums=0)
def our_logits(lm, params, ids):
    return lm.apply({"params": params}, ids)


def tensors_of(lm, params):
    return to_hf(table(lm.config), jax.device_get(params), lm.config.num_layers, VOCAB)


def write(folder, lm, params, **extra):
    """An export, with `extra` tensors in the file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(lm.config, VOCAB, None, None)), encoding="utf-8")
    for name, content in extra_files().items():
        (folder / name).write_bytes(content)
    save_file(tensors_of(lm, params) | extra, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder):
    """The torch model, which must have found every tensor it expects and no other."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def logits_of(model, ids, **keywords):
    with torch.no_grad():
        return model(torch.as_tensor(ids), **keywords).logits.numpy()


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The default variant: our model, its parameters, the folder of its export, and the torch model."""
    lm, params = make()
    folder = write(tmp_path_factory.mktemp("default") / "hf", lm, params)
    return lm, params, folder, load(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree(tmp_path, variant):
    lm, params = make(**VARIANTS[variant])
    expected = logits_of(load(write(tmp_path / "hf", lm, params)), tokens())
    assert expected.shape == (2, 24, VOCAB)
    assert np.abs(expected).max() > 1
    assert np.abs(our_logits(lm, params, tokens()) - expected).max() < 1e-4


def test_dropout_is_in_the_same_places(tmp_path, monkeypatch):
    """With the factor 1 - p instead of random masks, training has the same outputs too."""
    lm, params = make(embed_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.4)
    theirs = load(write(tmp_path / "hf", lm, params)).train()

    def in_torch(x, p=0.5, training=True, inplace=False):
        return x * (1 - p) if training else x

    def in_flax(self, x, deterministic, rng=None):
        return x if deterministic else x * (1 - self.rate)

    monkeypatch.setattr(torch.nn.functional, "dropout", in_torch)
    monkeypatch.setattr(nn.Dropout, "__call__", in_flax)
    hidden = jax.jit(lambda p, ids: lm.apply({"params": p}, ids, False, method="hidden"))(params, tokens())
    ours = np.asarray(lm.apply({"params": params}, hidden, method="logits"))
    assert np.abs(ours - logits_of(theirs, tokens())).max() < 1e-4
    assert np.abs(ours - logits_of(theirs.eval(), tokens())).max() > 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(default, side):
    *_, theirs = default
    ids = tokens()
    real = slice(14, 24) if side == "left" else slice(0, 10)
    padded, mask = np.full_like(ids, 5), np.ones_like(ids)
    padded[0], padded[1, real] = ids[0], ids[1, :10]
    mask[1] = 0
    mask[1, real] = 1
    for kind in (torch.int64, torch.bool):
        found = logits_of(theirs, padded, attention_mask=torch.from_numpy(mask).to(kind))
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found[0], logits_of(theirs, ids)[0], atol=1e-4)
        np.testing.assert_allclose(found[1, real], logits_of(theirs, ids)[1, :10], atol=1e-4)


def test_embeddings_instead_of_tokens_and_only_the_last_logits(default):
    *_, theirs = default
    ids = torch.from_numpy(tokens())
    with torch.no_grad():
        embedded = theirs.get_input_embeddings()(ids)
        found = theirs(inputs_embeds=embedded, logits_to_keep=3, return_dict=False)[0].numpy()
    np.testing.assert_allclose(found, logits_of(theirs, ids)[:, -3:], atol=1e-5)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        theirs(ids, inputs_embeds=embedded)


def test_greedy_generation_equals_ours_with_a_cache(default):
    lm, params, _, theirs = default
    prompt = tokens()[0, :6]
    settings = SamplingSettings(max_new_tokens=14, temperature=0)
    ours = sample(lm, params, prompt, jax.random.key(0), settings, eos_id=None)
    assert len(set(ours)) > 2
    found = theirs.generate(torch.from_numpy(prompt)[None], max_new_tokens=14, do_sample=False)
    assert found[0, 6:].tolist() == ours
    padded = torch.from_numpy(np.concatenate([np.full(3, 5), prompt]))[None]
    mask = torch.arange(9)[None] >= 3
    found = theirs.generate(padded, attention_mask=mask.long(), max_new_tokens=14, do_sample=False)
    assert found[0, 9:].tolist() == ours


def test_saving_it_again_keeps_weights_config_and_code(default, tmp_path):
    lm, params, _, theirs = default
    theirs.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    expected = to_hf_config(lm.config, VOCAB, None, None)
    assert {name: config.get(name) for name in expected} == expected
    for name, content in extra_files().items():
        assert (tmp_path / "again" / name).read_bytes() == content
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == tensors_of(lm, params).keys()
    again = load(tmp_path / "again")
    assert again.lm_head.weight is again.get_input_embeddings().weight
    np.testing.assert_array_equal(logits_of(again, tokens()), logits_of(theirs, tokens()))


def test_second_names_of_published_files_are_accepted(default, tmp_path, caplog):
    lm, params, _, theirs = default
    trunk = "backpack.gpt2_model."
    stored = tensors_of(lm, params)
    extra = {
        "backpack.word_embeddings.weight": stored[trunk + "wte.weight"],
        "backpack.position_embeddings.weight": stored[trunk + "wpe.weight"],
        "lm_head.weight": stored[trunk + "wte.weight"],
        trunk + "h.0.attn.bias": np.tril(np.ones((1, 1, 24, 24), np.float32)),
        trunk + "h.1.attn.masked_bias": np.full(1, -1e4, np.float32),
    }
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        published = load(write(tmp_path / "hf", lm, params, **extra))
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    np.testing.assert_array_equal(logits_of(published, tokens()), logits_of(theirs, tokens()))
