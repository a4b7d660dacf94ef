"""MPT: its attention against plain numpy, packed documents, any length, no biases."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from models import quick

from lmtrain.models.interface import NO_DOCUMENTS
from lmtrain.models.mpt.config import MptConfig
from lmtrain.models.mpt.model import MptAttention, MptLM
from lmtrain.models.params import flatten

SIZES = {"hidden_dim": 24, "num_heads": 6, "num_layers": 2, "seq_len": 12, "mlp_scale": 2, "use_bias": True}
VOCAB = 20
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 12))


def model(**changes) -> MptLM:
    return MptLM(MptConfig(**SIZES | changes), VOCAB)


@pytest.fixture(scope="module")
def params():
    return quick.random_params(model())


def hidden(params, tokens) -> np.ndarray:
    return np.asarray(jax.jit(lambda p: model().apply({"params": p}, tokens, True, method="hidden"))(params))


def plain_attention(params, x: np.ndarray, clip: float, scale: float, powers: list[float]) -> np.ndarray:
    """Attention of one sequence [S, D], by head and query; slopes are 2 ** -`powers`."""
    qkv = np.einsum("sd,dnhc->nhsc", x, params["qkv"]["kernel"]) + params["qkv"]["bias"][:, :, None]
    q, k, v = np.clip(qkv, -clip, clip)
    out = np.tile(params["out"]["bias"], (len(x), 1))
    for head, power in enumerate(powers):
        for s in range(len(x)):
            scores = k[head, : s + 1] @ q[head, s] * scale - 2.0**-power * (s - np.arange(s + 1))
            weights = np.exp(scores - scores.max())
            out[s] += (weights / weights.sum()) @ v[head, : s + 1] @ params["out"]["kernel"][head]
    return out


EIGHT = [2, 4, 6, 8, 1, 3]  # six of eight heads' exponents, in the published order


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        ({"clip_qkv": 0.7}, (0.7, 0.5, EIGHT)),
        ({"softmax_scale": 0.9}, (np.inf, 0.9, EIGHT)),
        ({"alibi_bias_max": 2.0}, (np.inf, 0.5, [n / 4 for n in EIGHT])),
        ({"num_heads": 4, "hidden_dim": 16}, (np.inf, 0.5, [2, 4, 6, 8])),
    ],
    ids=["clip_qkv", "softmax_scale", "alibi_bias_max", "4 heads"],
)
def test_attention_equals_its_formula(changes, formula):
    config = MptConfig(**SIZES | changes)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, config.hidden_dim)).astype(np.float32)
    attention = MptAttention(config, "xla")
    shapes = nn.meta.unbox(jax.eval_shape(lambda: attention.init(jax.random.key(0), x, 0, True, NO_DOCUMENTS)))[
        "params"
    ]
    params = jax.tree.map(lambda p: (rng.normal(size=p.shape) * 0.4).astype(np.float32), shapes)
    found = jax.jit(lambda p, x: attention.apply({"params": p}, x, 0, True, NO_DOCUMENTS))(params, x)
    for row in range(2):
        np.testing.assert_allclose(found[row], plain_attention(params, x[row], *formula), rtol=1e-4, atol=1e-4)


def test_any_length_is_accepted_and_later_tokens_have_no_influence(params):
    longer = np.concatenate([TOKENS, TOKENS[:, ::-1]], axis=1)
    np.testing.assert_allclose(hidden(params, longer)[:, :12], hidden(params, TOKENS), rtol=1e-4, atol=1e-4)


def test_without_use_bias_there_are_no_biases(params):
    with_biases = flatten(params).keys()
    without = flatten(quick.random_params(model(use_bias=False))).keys()
    assert without == {path for path in with_biases if not path.endswith("bias")}
    assert len(with_biases) - len(without) == 7
    assert MptConfig().use_bias is False
