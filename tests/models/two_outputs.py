"""A test family with a second output: each position also predicts the token after the next one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import normal

from lmtrain.models.base_config import FurtherLoss
from lmtrain.models.interface import Documents, Head, Outputs
from lmtrain.models.layers.linear import Linear
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaLM
from lmtrain.objectives.config import CrossEntropyConfig
from lmtrain.objectives.cross_entropy import build_objective
from lmtrain.objectives.interface import Objective

SECOND = "second_token"
COEFFICIENT = 0.3


class TwoOutputConfig(LlamaConfig):
    @property
    def further_losses(self) -> Mapping[str, FurtherLoss]:
        return {"second_loss": FurtherLoss(SECOND, 2, COEFFICIENT)}

    def build(self, vocab_size: int, attention: str) -> "TwoOutputLM":
        return TwoOutputLM(self, vocab_size, attention)


class TwoOutputLM(LlamaLM):
    """The second output is tanh(h[t] W + e[t + 1] V), with e the embeddings, which are also its head."""

    config: TwoOutputConfig

    def setup(self) -> None:
        super().setup()
        width = self.config.hidden_dim
        self.of_hidden, self.of_next = (Linear((("embed", width),), (("mlp", width),), normal(0.5)) for _ in range(2))

    def further_outputs(
        self, hidden_BSD: jax.Array, tokens_BS: jax.Array, deterministic: bool, documents: Documents
    ) -> Outputs:
        following = self.embed(jnp.roll(tokens_BS, -1, axis=1))
        hidden = jnp.tanh(self.of_hidden(hidden_BSD) + self.of_next(following))
        return {SECOND: Head(hidden, self.tokens.embedding, self.vocab_size)}


def two_output_config(**changes: Any) -> TwoOutputConfig:
    sizes = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_layers": 2, "seq_len": 12}
    return TwoOutputConfig(**sizes | {"pad_vocab_to_multiple_of": 8} | changes)


def two_output_objective(**settings: Any) -> Objective:
    """The objective of a run with cross-entropy."""
    return build_objective(CrossEntropyConfig(**settings), 0.0, two_output_config().further_losses)
