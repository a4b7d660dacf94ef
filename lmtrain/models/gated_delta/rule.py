"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), in chunks and token by token.

Each value head has a state S [C, E], which maps keys to values. A token with key k, value v, decay exp(g) <= 1 and
strength beta replaces what the state has for its key, and reads the state with its query:

    S <- exp(g) S;   S <- S + k (beta (v - k S));   o = q S

In chunks of L tokens this is a few matrix products (the WY form of Yang et al. 2024, "Parallelizing linear transformers
with the delta rule over sequence length"). With G the cumulative sum of g within the chunk and D_ij = exp(G_i - G_j)
for j <= i, the values that a chunk writes follow from those before them by a triangular system, whose inverse is T:

    A = strictly lower part of beta_i (k_i . k_j) D_ij;   T = (I + A)^-1
    new = T beta (v - exp(G) k S);   o = exp(G) q S + (q k^T D) new;   S <- exp(G_L) S + k^T exp(G_L - G) new

Documents in one sequence never meet: D is 0 between two of them, only the chunk's first document reads the state, and
only its last one writes it. Gates of -inf would give NaN, and large ones would spoil the cumulative sums.

    B batch  T positions  L positions of a chunk  N chunks  K key heads  R value heads of a key head  H value heads
    C width of keys  E width of values
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.models.gated_delta.config import CHUNK
from lmtrain.models.gated_delta.inverse import EXACT, INVERSE, unit_inverse


def gated_delta_rule(
    q_BTKC: jax.Array,
    k_BTKC: jax.Array,
    v_BTHE: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    starts_BT: jax.Array | None = None,
    state_BHCE: jax.Array | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """The outputs [B, T, H, E], in the dtype of `v`, and the state after the last token, float32 [B, H, C, E].

    `q` and `k` are normalized, `q` is scaled; `g` <= 0 and `beta` are float32. `starts` are the first tokens of
    documents, None: there is one document; `state` is that before the first token, None: zeros. A token with g = 0 and
    beta = 0 leaves the state as it is: padding. Products are in the dtype of the inputs; inverse, gates and state in
    float32.
    """
    batch, length, heads, width = v_BTHE.shape
    kv_heads, key_width = k_BTKC.shape[2:]
    chunk = min(chunk, length)
    if state_BHCE is None:
        state_BHCE = jnp.zeros((batch, heads, key_width, width), jnp.float32)
    starts_BT = jnp.zeros((batch, length), bool) if starts_BT is None else starts_BT
    padded = -length % chunk

    def cut(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [N, B, L, ...]"""
        x = jnp.pad(x, ((0, 0), (0, padded), *((0, 0) for _ in x.shape[2:])))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    def of_values(x: jax.Array) -> jax.Array:
        """[B, T, H, ...] -> [N, B, K, R, L, ...]"""
        x = jnp.moveaxis(cut(x), 3, 2)
        return x.reshape(*x.shape[:2], kv_heads, heads // kv_heads, *x.shape[3:])

    q, k = (jnp.moveaxis(cut(x), 3, 2) for x in (q_BTKC, k_BTKC))
    parts = q, k, of_values(v_BTHE), of_values(g_BTH), of_values(beta_BTH), cut(starts_BT)
    state = state_BHCE.reshape(batch, kv_heads, heads // kv_heads, key_width, width)
    policy = jax.checkpoint_policies.save_only_these_names(INVERSE)
    state, out = jax.lax.scan(jax.checkpoint(_chunk, policy=policy), state, parts)
    out = jnp.moveaxis(out.reshape(out.shape[0], batch, heads, chunk, width), (0, 2), (1, 3))
    return out.reshape(batch, -1, heads, width)[:, :length], state.reshape(state_BHCE.shape)


def _chunk(state_BKRCE: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and its outputs [B, K, R, L, E]."""
    q_BKLC, k_BKLC, v_BKRLE, g_BKRL, beta_BKRL, starts_BL = part
    dtype, length = v_BKRLE.dtype, v_BKRLE.shape[3]
    precision = EXACT if dtype == jnp.float32 else None
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    document = jnp.cumsum(starts_BL, -1)[:, None, None]  # of the chunk; 0: the one that the state is of
    decay = jnp.cumsum(g_BKRL, -1)
    lower = np.tril(np.ones((length, length), bool))
    meet = (document[..., :, None] == document[..., None, :]) & lower
    # masked before the exponential: 0 * inf in the gradient otherwise
    between = jnp.exp(jnp.where(meet, decay[..., :, None] - decay[..., None, :], -jnp.inf))
    from_state = jnp.where(document == 0, jnp.exp(decay), 0.0)
    to_state = jnp.where(document == document[..., -1:], jnp.exp(decay[..., -1:] - decay), 0.0)

    kk, qk = (product("BKIC,BKJC->BKIJ", x, k_BKLC)[:, :, None] * between for x in (k_BKLC, q_BKLC))
    strictly = lower & ~np.eye(length, dtype=bool)
    inverse = unit_inverse(jnp.where(strictly, kk * beta_BKRL[..., None], 0.0))
    read = state_BKRCE.astype(dtype)
    of_k, of_q = (product("BKIC,BKRCE->BKRIE", x, read) * from_state[..., None] for x in (k_BKLC, q_BKLC))
    new = product(
        "BKRIJ,BKRJE->BKRIE", (inverse * beta_BKRL[..., None, :]).astype(dtype), (v_BKRLE - of_k).astype(dtype)
    )
    out = of_q + product("BKRIJ,BKRJE->BKRIE", qk.astype(dtype), new.astype(dtype))
    written = product("BKIC,BKRIE->BKRCE", k_BKLC, (new * to_state[..., None]).astype(dtype))
    return state_BKRCE * from_state[..., -1:, None] + written, out.astype(dtype)


def gated_delta_step(
    q_BKC: jax.Array, k_BKC: jax.Array, v_BHE: jax.Array, g_BH: jax.Array, beta_BH: jax.Array, state_BHCE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of `gated_delta_rule`: its output [B, H, E], and the state after it."""
    repeats = v_BHE.shape[1] // k_BKC.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), repeats, axis=1) for x in (q_BKC, k_BKC))
    state = state_BHCE * jnp.exp(g_BH)[..., None, None]
    change = (v_BHE - jnp.einsum("BHC,BHCE->BHE", k, state)) * beta_BH[..., None]
    state = state + k[..., None] * change[..., None, :]
    return jnp.einsum("BHC,BHCE->BHE", q, state).astype(v_BHE.dtype), state
