"""Gated DeltaNet as a layer: projections, a short convolution, the gated delta rule, and a norm with a gate.

Yang et al. 2024, in the form of Qwen3-Next:

    q, k, v = silu(convolution(x Wq, x Wk, x Wv));   q, k = q / |q|, k / |k|;   beta = sigmoid(x Wb)
    g = -exp(A_log) softplus(x Wa + dt_bias);   y = (norm(rule(q / sqrt(C), k, v, g, beta)) * silu(x Wz)) Wo

    B batch  S position  D embed  H value heads  C width of keys  W taps
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer, normal

from lmtrain.models.cache import StackCache
from lmtrain.models.gated_delta import chunks
from lmtrain.models.gated_delta.config import GatedDeltaMixer
from lmtrain.models.gated_delta.devices import mix
from lmtrain.models.gated_delta.rule import gated_delta_rule, gated_delta_step
from lmtrain.models.interface import Documents
from lmtrain.models.layers.linear import Dims, Linear, declare, sizes
from lmtrain.models.layers.mlp import RmsNorm
from lmtrain.sharding.placement import constrain

# Added to the squared lengths of queries and keys.
_EPSILON = 1e-6
# Initial decay rates are exp(A_log) between these.
_RATES = (0.01, 16.0)


class GatedDelta(nn.Module):
    """The module of `GatedDeltaMixer`, the only mixer of `config.mixers`: [B, S, D] -> [B, S, D]."""

    config: Any

    def setup(self) -> None:
        c, mixer = self.config, self.mixer
        own, init = mixer.config, normal(c.initializer_range)
        embed, keys, values = (("embed", c.hidden_dim),), self._keys, self._values
        self.q, self.k = (Linear(embed, keys, init, False, is_flat=True) for _ in range(2))
        self.v, self.z = (Linear(embed, values, init, False, is_flat=True) for _ in range(2))
        self.b, self.a = (Linear(embed, values[:1], init, False) for _ in range(2))
        self.out = Linear(values, embed, init, False, is_flat=True)
        self.norm_out = RmsNorm(values[1:], own.norm_epsilon or c.layer_norm_epsilon)
        taps: Dims = (("position", own.conv_kernel_dim),)
        around_zero = _uniform(-(own.conv_kernel_dim**-0.5), own.conv_kernel_dim**-0.5)

        def kernel(name: str, dims: Dims) -> jax.Array:
            value: jax.Array = self.param(name, declare(around_zero, taps + dims), sizes(taps + dims), jnp.float32)
            return value

        self.conv_q, self.conv_k, self.conv_v = (
            kernel(name, dims) for name, dims in (("conv_q", keys), ("conv_k", keys), ("conv_v", values))
        )

        heads = values[:1]
        self.a_log = self.param("a_log", declare(_log_rates, heads), sizes(heads), jnp.float32)
        self.dt_bias = self.param("dt_bias", declare(nn.initializers.ones, heads), sizes(heads), jnp.float32)

    @property
    def mixer(self) -> GatedDeltaMixer:
        mixer: GatedDeltaMixer = self.config.mixers[0]
        return mixer

    @property
    def _keys(self) -> Dims:
        return (("heads", self.mixer.config.num_key_heads), ("head_dim", self.mixer.config.key_head_dim))

    @property
    def _values(self) -> Dims:
        return (("heads", self.mixer.config.num_value_heads), ("head_dim", self.mixer.config.value_head_dim))

    def __call__(self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents) -> jax.Array:
        within, starts = _positions(documents, x)
        raw, norm = tuple(_flat(part(x)) for part in (self.q, self.k, self.v, self.z)), self.norm_out
        epsilons, own = (norm.epsilon, _EPSILON), self.mixer.config
        return self._result(mix(raw, self._taps, *self._gates(x), starts, within, norm.scale, epsilons, own))

    @property
    def _taps(self) -> tuple[jax.Array, ...]:
        return self.conv_q, self.conv_k, self.conv_v

    def _result(self, mixed: jax.Array) -> jax.Array:
        result: jax.Array = self.out(_flat(mixed).reshape(*mixed.shape[:2], *sizes(self._values)))
        return result

    def extend(
        self, x: jax.Array, layer: jax.Array, cache: StackCache, start: jax.Array, count: Any
    ) -> tuple[jax.Array, StackCache]:
        """New tokens after those of the cache, of which the last may come again (`LanguageModel.extend`).

        The first `count` but one are read in chunks, and the last of them by a step, so that the state before it stays.
        """
        kind, number = cache.find(self.mixer, layer)
        arrays = cache.states[kind]
        state = {name: jax.lax.dynamic_index_in_dim(part, number, keepdims=False) for name, part in arrays.items()}
        batch, length = x.shape[:2]
        rows, taps = jnp.arange(batch), self.mixer.config.conv_kernel_dim
        start, count = (jnp.broadcast_to(value, (batch,)) for value in (start, length if count is None else count))
        again = jnp.clip(state["seen"] - start, 0, 1)  # tokens of the cache that come again
        kept = jnp.where(again[:, None, None, None] > 0, state["before"], state["after"])
        inputs, at = tuple(_flat(part(x)) for part in (self.q, self.k, self.v)), jnp.arange(length)
        before = state["inputs"][rows[:, None], 1 - again[:, None] + jnp.arange(taps - 1)]
        ends = np.cumsum([part.shape[2] for part in inputs])[:2]
        earlier = jnp.split(before, ends, axis=-1)
        q, k, v = chunks.inputs(inputs, self._taps, start[:, None] + at, earlier, _EPSILON)
        g, beta = self._gates(x)
        last = jnp.maximum(count, 1) - 1
        core = jnp.zeros_like(v)
        if length > 1:
            is_earlier = (at < last[:, None])[..., None]
            core, kept = gated_delta_rule(
                q, k, v, jnp.where(is_earlier, g, 0), jnp.where(is_earlier, beta, 0), None, kept
            )
        final = q[rows, last], k[rows, last], v[rows, last], g[rows, last], beta[rows, last]
        output, after = gated_delta_step(*final, kept)
        joint = jnp.concatenate(inputs, axis=-1)
        known = jnp.concatenate([before, joint.astype(before.dtype)], axis=1)
        new = {
            "before": kept,
            "after": after,
            "inputs": known[rows[:, None], last[:, None] + jnp.arange(taps)],
            "seen": start + count,
        }
        for name, part in new.items():
            is_new = (count > 0).reshape(-1, *[1] * (part.ndim - 1))
            new[name] = arrays[name].at[number].set(jnp.where(is_new, part, state[name]))
        core, epsilon = core.at[rows, last].set(output), self.norm_out.epsilon
        mixed = chunks.gated(core, _flat(self.z(x)), self.norm_out.scale, epsilon)
        return self._result(mixed), cache.with_state(kind, new)

    def _gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logarithms of the decay and strengths, float32 [B, S, H]."""
        steps = jax.nn.softplus(self.a(x).astype(jnp.float32) + self.dt_bias.astype(jnp.float32))
        strength = jax.nn.sigmoid(self.b(x).astype(jnp.float32)) * (2 if self.mixer.config.negative_eigenvalues else 1)
        return -jnp.exp(self.a_log.astype(jnp.float32)) * steps, strength


def _flat(x: jax.Array) -> jax.Array:
    """[B, S, columns], with the columns of all heads: kernels read them so, and with heads as a dimension of their own
    the compiler would copy what it passes on."""
    return constrain(x.reshape(*x.shape[:2], -1), "act_batch", "act_seq", "act_heads")


def _uniform(low: float, high: float) -> Initializer:
    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, low, high)

    return init


def _log_rates(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
    return jnp.log(_uniform(*_RATES)(key, shape, dtype))


def _positions(documents: Documents, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Positions within documents [B, S], and which of them begin one; None: there is one."""
    at = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    segments = documents.segments
    if segments is None:
        return at, None
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return at - jax.lax.cummax(jnp.where(starts, at, 0), axis=1), starts
