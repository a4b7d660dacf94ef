"""A block of attention and MLP, and the parts that families share."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from lmtrain.models.cache import StackCache
from lmtrain.models.interface import NO_DOCUMENTS
from lmtrain.models.layers.block import Attention, Block, Projected, split_qkv
from lmtrain.models.mixer import AttentionMixer


class Doubling(nn.Module):
    factor: float

    def __call__(self, x):
        return self.factor * x


class OneHead(Attention):
    """Queries, keys and values are the input."""

    def setup(self):
        self.drop_weights = nn.Dropout(0.0)

    def project(self, x, positions_BS):
        return Projected(x[:, None], x[:, None], x[:, None])

    def scores(self, layer):
        return {"scale": 0.0}

    def out(self, mixed_BSHC):
        return mixed_BSHC[:, :, 0]


class Plain(Block):
    def setup(self):
        self.norm_attn, self.norm_mlp = Doubling(2.0), Doubling(3.0)
        self.attn, self.mlp = OneHead(self.config, self.backend), Doubling(10.0)
        self.drop = nn.Dropout(0.0)


class Config:
    flash_attention_block_size = None
    mixers = 2 * (AttentionMixer(hidden_dim=3, heads=1, kv_heads=1, head_width=3),)


X = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)


def test_attention_and_mlp_are_added_to_the_stream_each_after_its_norm():
    """With scores of zero, attention is the mean of the positions so far."""
    means = np.cumsum(2 * X, axis=1) / np.arange(1, 5)[:, None]
    middle = X + means
    found, _ = Plain(Config(), "xla").apply({}, X, 0, True, NO_DOCUMENTS)
    np.testing.assert_allclose(found, middle + 10 * 3 * middle, rtol=1e-5)


def test_extending_a_cache_gives_the_same_block():
    block = Plain(Config(), "xla")
    whole, _ = block.apply({}, X, 0, True, NO_DOCUMENTS)
    cache, parts = StackCache.empty(Config.mixers, 2, 4, jnp.float32), []
    for start, end in ((0, 3), (3, 4)):
        (part, cache), _ = block.apply({}, (X[:, start:end], cache), 1, jnp.int32(start), method="extend")
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-5)
    assert not cache.states[0]["k"][0].any()  # of the other layer


def test_one_product_is_split_into_queries_keys_and_values_by_head_and_clipped():
    qkv = np.arange(2 * 5 * 3 * 4 * 2, dtype=np.float32).reshape(2, 5, 3, 4, 2)
    for part, found in enumerate(split_qkv(qkv)[:3]):
        np.testing.assert_array_equal(found, qkv[:, :, part].transpose(0, 2, 1, 3))
    assert {float(np.abs(found).max()) for found in split_qkv(qkv - 100, clip=7.0)[:3]} == {7.0}
