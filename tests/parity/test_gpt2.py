"""GPT-2 with all parameters random is the same function, loss and gradient in transformers and torch."""

import jax
import numpy as np
import pytest
import torch
from conftest import TOKENIZER
from flax.linen.meta import unbox
from transformers import GPT2LMHeadModel

from lmtrain.hf.export import write_hf_folder
from lmtrain.hf.key_map import to_hf
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.hf import TABLE, to_hf_config
from lmtrain.models.registry import build_model
from lmtrain.train.loss import next_token_targets, summed_cross_entropy

VOCAB = 384
TINY = {"seq_len": 17, "hidden_dim": 24, "num_heads": 3, "num_layers": 3}
VARIANTS = {
    "plain": {},
    "inverse_layer": {"scale_attn_by_inverse_layer_idx": True},
    "mlp_scale_2": {"mlp_scale": 2},
    "both_and_epsilon": {"scale_attn_by_inverse_layer_idx": True, "mlp_scale": 2, "layer_norm_epsilon": 0.1},
    "upcast": {"upcast_attn": True, "num_heads": 1},
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 17), dtype=np.int32)


def randomised(model):
    """Every parameter random, norms and biases included, of a size that makes logits of order 1 to 10."""
    random = np.random.default_rng(1)
    shapes = unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"])
    return jax.tree.map(lambda leaf: random.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request, tmp_path_factory):
    """Our model and parameters, and transformers' model of the exported folder."""
    config = Gpt2Config(**(TINY | VARIANTS[request.param]))
    model = build_model(config, VOCAB)
    params = randomised(model)
    tokenizer = load_tokenizer(str(TOKENIZER))
    folder = str(tmp_path_factory.mktemp("export") / "model")
    hf_config = to_hf_config(config, VOCAB, tokenizer.eos_id, tokenizer.bos_id)
    write_hf_folder(folder, to_hf(TABLE, params), hf_config, tokenizer, "float32")
    theirs, loading = GPT2LMHeadModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model, params, theirs.eval()


def test_logits_agree(pair):
    model, params, theirs = pair
    ours = np.asarray(model.apply({"params": params}, TOKENS))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
    assert np.abs(expected).max() > 1  # large enough for the comparison to mean something
    assert np.abs(ours - expected).max() < 1e-4


def test_loss_and_every_gradient_agree(pair):
    model, params, theirs = pair
    mask = np.arange(17) < np.array([[16], [9], [1]])  # the last position is never a target

    def loss(params):
        hidden = model.apply({"params": params}, TOKENS, True, method="hidden")
        head = model.apply({"params": params}, method="head")
        return summed_cross_entropy(hidden, head, next_token_targets(TOKENS), mask)

    ours, gradients = jax.jit(jax.value_and_grad(loss))(params)

    ids = torch.from_numpy(TOKENS).long()
    labels = torch.where(torch.from_numpy(mask), ids.roll(-1, 1), -100)
    theirs.zero_grad()
    logits = theirs(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    assert float(ours) == pytest.approx(expected.item(), rel=1e-5)

    by_name = dict(theirs.named_parameters())
    got = to_hf(TABLE, gradients)
    assert got.keys() == by_name.keys()
    for name, gradient in got.items():
        reference = by_name[name].grad.numpy()
        scale = np.abs(reference).max()
        assert scale > 1e-3, name
        assert np.abs(gradient - reference).max() < 1e-4 * max(scale, 1), name


def test_cached_logits_agree(pair):
    """Six tokens first, then three more at once: both sides with their caches."""
    model, params, theirs = pair
    cache = model.apply({"params": params}, 3, 17, method="empty_cache")
    extend = jax.jit(
        lambda tokens, cache, start: model.apply({"params": params}, tokens, cache, start, method="extend")
    )
    _, cache = extend(TOKENS[:, :6], cache, 0)
    last, _ = extend(TOKENS[:, 6:9], cache, 6)
    with torch.no_grad():
        first = theirs(torch.from_numpy(TOKENS[:, :6]).long(), use_cache=True)
        second = theirs(torch.from_numpy(TOKENS[:, 6:9]).long(), past_key_values=first.past_key_values)
    assert np.abs(np.asarray(last) - second.logits.numpy()).max() < 1e-4
