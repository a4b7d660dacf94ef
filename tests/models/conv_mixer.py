"""A test family with another token mixer: layers of a causal convolution and of attention, in turn."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import normal

from lmtrain.models.cache import StackCache
from lmtrain.models.interface import Documents
from lmtrain.models.layers.stack import Pattern
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaBlock, LlamaLM
from lmtrain.models.mixer import Mixer, SequenceSplit, StateArray

TAPS = 3


@dataclass(frozen=True)
class ConvMixer:
    """y[t] = sum over j of w[j] * x[t - j], for each channel; its state has the last inputs."""

    hidden_dim: int

    @property
    def forgets(self) -> bool:
        return True

    @property
    def features(self) -> Set[str]:
        return set()

    def flops(self, seq_len: int, causal: bool) -> tuple[float, float]:
        return 2 * TAPS * self.hidden_dim, 0.0

    def split(self, parts: int, head_parts: int) -> SequenceSplit | None:
        return None

    def state(self, length: int) -> Mapping[str, StateArray]:
        """The last inputs, and how many there were."""
        return {"inputs": StateArray((TAPS, self.hidden_dim)), "seen": StateArray((), "int32")}


class CausalConv(nn.Module):
    """The module of `ConvMixer`."""

    config: Any

    def setup(self) -> None:
        axes = nn.with_logical_partitioning(normal(0.5), ("position", "embed"))
        self.taps = self.param("taps", axes, (TAPS, self.config.hidden_dim))

    def __call__(self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents) -> jax.Array:
        found, length = x * self.taps[0], x.shape[1]
        for tap in range(1, TAPS):
            earlier = jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, :length]
            if (segments := documents.segments) is not None:
                same = jnp.pad(segments, ((0, 0), (tap, 0)), constant_values=-1)[:, :length] == segments
                earlier = jnp.where(same[..., None], earlier, 0)
            found += self.taps[tap] * earlier
        return found

    def extend(
        self, x: jax.Array, layer: jax.Array, cache: StackCache, start: jax.Array, count: Any
    ) -> tuple[jax.Array, StackCache]:
        kind, number = cache.find(self.config.mixers[0], layer)
        state = cache.states[kind]
        inputs, seen = (jax.lax.dynamic_index_in_dim(part, number, keepdims=False) for part in state.values())
        (batch, length, _), rows = x.shape, jnp.arange(x.shape[0])[:, None]
        start = jnp.broadcast_to(start, (batch,))
        count = jnp.broadcast_to(length if count is None else count, (batch,))
        # the inputs before `start`: the last one may be read again, so that `seen` is `start` or one more
        before = inputs[rows, 1 - jnp.clip(seen - start, 0, 1)[:, None] + jnp.arange(TAPS - 1)]
        known = jnp.concatenate([before, x], axis=1)
        found = sum(self.taps[tap] * known[:, TAPS - 1 - tap :][:, :length] for tap in range(TAPS))
        last = known[rows, jnp.maximum(count, 1)[:, None] - 1 + jnp.arange(TAPS)]
        is_new = count > 0
        new = {"inputs": jnp.where(is_new[:, None, None], last, inputs), "seen": jnp.where(is_new, start + count, seen)}
        return found, cache.with_state(kind, {name: state[name].at[number].set(new[name]) for name in state})


class ConvConfig(LlamaConfig):
    """Llama whose layers 0, 2, ... mix positions by a convolution. `layers` of a block: those of its kind."""

    layers: Literal["both", "conv", "attention"] = "both"

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        attention = super().mixers
        chosen = {"both": (0, 1), "conv": (0,), "attention": (1,)}[self.layers]
        return tuple(
            ConvMixer(self.hidden_dim) if chosen[layer % len(chosen)] == 0 else attention[layer]
            for layer in range(self.num_layers)
        )

    def build(self, vocab_size: int, attention: str) -> "ConvLM":
        return ConvLM(self, vocab_size, attention)


class ConvBlock(LlamaBlock):
    config: ConvConfig

    def setup(self) -> None:
        super().setup()
        self.conv = CausalConv(self.config)

    @property
    def mixer(self) -> Any:
        return self.conv if self.config.layers == "conv" else self.attn


class ConvLM(LlamaLM):
    config: ConvConfig

    block = ConvBlock

    @property
    def pattern(self) -> Pattern:
        layers = ("conv", "attention")
        return Pattern((), tuple(self.config.model_copy(update={"layers": kind}) for kind in layers))


def conv_config(num_layers: int = 4, seq_len: int = 12, **changes: Any) -> ConvConfig:
    sizes = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_kv_heads": 2, "pad_vocab_to_multiple_of": 8}
    return ConvConfig(**sizes | changes, num_layers=num_layers, seq_len=seq_len)
