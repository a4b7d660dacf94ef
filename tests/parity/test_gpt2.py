"""A GPT-2 with every parameter random is the same function in transformers: logits, loss and gradients."""

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from lmtrain.hf.export import write_hf_folder
from lmtrain.hf.key_map import to_hf
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.hf import TABLE, to_hf_config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.train.loss import next_token_targets, summed_cross_entropy

SIZES = {"hidden_dim": 32, "num_heads": 4, "num_layers": 3, "seq_len": 24}
VOCAB = 384


@pytest.fixture
def tokenizer(settings):
    return load_tokenizer(settings["data"]["tokenizer"])


@pytest.fixture
def both(tmp_path, tokenizer):
    """`both(mlp_scale=2)` gives our model, its parameters, and the torch model loaded from their export."""

    def make(**changes):
        config = Gpt2Config(**SIZES | changes)
        lm = Gpt2LM(config, VOCAB)
        shapes = nn.meta.unbox(jax.eval_shape(lm.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32)))
        rng = np.random.default_rng(7)
        params = jax.tree.map(lambda p: (rng.normal(size=p.shape) * 0.3).astype(np.float32), shapes["params"])
        hf_config = to_hf_config(config, VOCAB, tokenizer.eos_id, tokenizer.bos_id)
        write_hf_folder(str(tmp_path / "hf"), to_hf(TABLE, params), hf_config, tokenizer, "float32")
        theirs, loading = GPT2LMHeadModel.from_pretrained(
            tmp_path / "hf", dtype=torch.float32, output_loading_info=True
        )
        assert not any(loading.values()), loading
        return lm, params, theirs.eval()

    return make


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (2, 24))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scale_attn_by_inverse_layer_idx": True, "mlp_scale": 2},
        {"upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
        {"layer_norm_epsilon": 0.1},
    ],
)
def test_logits_agree(both, changes):
    lm, params, theirs = both(**changes)
    ours = np.asarray(lm.apply({"params": params}, tokens()))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens())).logits.numpy()
    assert np.abs(expected).max() > 1
    assert np.abs(ours - expected).max() < 1e-4


def test_loss_and_every_gradient_agree(both):
    lm, params, theirs = both()
    ids = tokens()
    mask = np.broadcast_to(np.arange(24) < 23, ids.shape)

    def loss(p):
        hidden = lm.apply({"params": p}, ids, True, method="hidden")
        head = lm.apply({"params": p}, method="head")
        return summed_cross_entropy(hidden, head, next_token_targets(ids), mask) / mask.sum()

    ours, gradients = jax.jit(jax.value_and_grad(loss))(params)
    expected = theirs(torch.from_numpy(ids), labels=torch.from_numpy(ids)).loss
    expected.backward()
    assert float(ours) == pytest.approx(expected.item(), rel=1e-5)
    named = dict(theirs.named_parameters())
    mapped = to_hf(TABLE, gradients)
    assert mapped.keys() == named.keys()
    for name, gradient in mapped.items():
        reference = named[name].grad.numpy()
        assert np.abs(gradient - reference).max() < 1e-4 * max(1, np.abs(reference).max()), name
