"""Tiny models with random parameters that need no compilation, and what their tests share."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.models.layers.head import logits_of
from lmtrain.models.layers.linear import Embed, Linear


def random_params(lm: nn.Module, scale: float = 0.4, seed: int = 1) -> Any:
    """Float32 parameters of a language model, all random and large enough to influence the result."""
    shapes = jax.eval_shape(lm.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: (rng.normal(size=p.shape) * scale).astype(np.float32), nn.meta.unbox(shapes)["params"]
    )


def changed_by_dropout(lm: nn.Module, plain: nn.Module, params: Any, tokens: np.ndarray) -> float:
    """Change of `lm`'s output by dropout in training; asserts that it evaluates as `plain`, which has no dropout."""
    assert (lm.has_dropout, plain.has_dropout) == (True, False)
    evaluation, without = (
        jax.make_jaxpr(lambda p, lm=lm: lm.apply({"params": p}, tokens, True, method="hidden"))(params)
        for lm in (lm, plain)
    )
    assert str(evaluation) == str(without)

    def hidden(lm: nn.Module, deterministic: bool) -> np.ndarray:
        rngs = {"dropout": jax.random.key(0)}
        run = jax.jit(lambda p: lm.apply({"params": p}, tokens, deterministic, method="hidden", rngs=rngs))
        return np.asarray(run(params))

    return float(np.abs(hidden(lm, False) - hidden(plain, True)).max())


def reached_tokens(lm: nn.Module, params: Any, segments: np.ndarray | None) -> list[int]:
    """Tokens whose embeddings influence positions 3 to 6 of the first of two rows, which holds tokens 0 to 7."""

    def second(params: Any) -> jax.Array:
        hidden = lm.apply({"params": params}, np.arange(16).reshape(2, 8), True, segments, method="hidden")
        return (hidden[0, 3:7] ** 3).sum()

    gradient = jax.jit(jax.grad(second))(params)["tokens"]["embedding"]
    return np.flatnonzero(np.abs(np.asarray(gradient)).sum(axis=1)).tolist()


class TwoTokenLM(nn.Module):
    """A language model that predicts from the last two tokens of a document, for tests of what surrounds a model.

    It compiles in a fraction of the time that the models of lmtrain take. Its table has rows of padding.
    """

    hidden_dim: int
    vocab_size: int
    attention: str = "xla"
    has_dropout: bool = False

    def setup(self) -> None:
        embed = ("embed", self.hidden_dim)
        rows = ("vocab", -(-self.vocab_size // 4) * 4)
        self.tokens = Embed(rows, self.hidden_dim, nn.initializers.normal(0.5), is_head=True)
        self.mix = Linear((embed,), (("mlp", self.hidden_dim),), nn.initializers.normal(0.5))

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        return logits_of(self.hidden(tokens_BS, True), self.head(), self.vocab_size)

    def hidden(
        self,
        tokens_BS: jax.Array,
        deterministic: bool,
        segments_BS: jax.Array | None = None,
        positions_BS: jax.Array | None = None,
    ) -> jax.Array:
        x = self.tokens(tokens_BS)
        last = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        if segments_BS is not None:
            same = jnp.diff(segments_BS, prepend=segments_BS[:, :1]) == 0
            last = last * same[..., None]
        return x + jnp.tanh(self.mix(x + 2 * last))

    def head(self) -> jax.Array:
        return self.tokens.embedding
