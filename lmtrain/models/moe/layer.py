"""A mixture of experts in place of an MLP.

Shazeer et al. 2017, "Outrageously Large Neural Networks". For each token, the outputs of its experts are added with the
router's weights; no token is dropped, whatever the load. With shared experts, the output of one more MLP, of their
total width, is added for all tokens (Dai et al. 2024, "DeepSeekMoE"), with `shared_gate` times a sigmoid (Qwen2-MoE).

Initial values: router and experts as other matrices; biases 0.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer

from lmtrain.models.layers.linear import Linear, declare, sizes
from lmtrain.models.layers.mlp import Mlp
from lmtrain.models.layers.remat import ROUTED
from lmtrain.models.moe.config import MoeConfig
from lmtrain.models.moe.experts import Experts, Gate
from lmtrain.models.moe.load import BIAS, add_load
from lmtrain.models.params import AUXILIARY, add_auxiliary
from lmtrain.sharding.placement import constrain

# The router of a mixture of experts: which experts each token uses, and their weights.
#
# Three kinds, by the scores s = x W of a token: with p = softmax(s), the K largest p (Fedus et al. 2022, "Switch
# Transformers", with K = 1); a softmax over the K largest s (Shazeer et al. 2017); the K largest sigmoid(s)
# (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2). The load is balanced by a loss, by a bias on the
# selection, or by both (section 2.1.2 there; Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
# Mixture-of-Experts").
#
#     B batch  S position  D embed  E experts  K experts of a token

# Added to the sum that divides sigmoids, as in DeepSeek-V3.
_EPSILON = 1e-20


# Name of the parameter of a router that is added to its scores.
SCORE_BIAS = "bias"


def score(x_BSD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    """x W [B, S, E] in float32. The kernel has the dtype of x, or float32 if x has 16 bits."""
    if x_BSD.dtype == kernel_DE.dtype:
        return jnp.einsum("BSD,DE->BSE", x_BSD, kernel_DE, preferred_element_type=jnp.float32)
    return _score_in_parts(x_BSD, kernel_DE)


@jax.custom_vjp
def _score_in_parts(x_BSD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    """x of 16 bits is multiplied with two parts of W in 16 bits, whose sum has an error of 2^-17. With W rounded to 16
    bits, more tokens would select other experts; products in float32 are slow, or rounded by default."""
    bits = jnp.finfo(x_BSD.dtype)
    # a cast to 16 bits and back could be optimized away
    high = jax.lax.reduce_precision(kernel_DE, bits.nexp, bits.nmant)
    parts = jnp.concatenate([high, kernel_DE - high], axis=-1).astype(x_BSD.dtype)
    scores = jnp.einsum("BSD,DE->BSE", x_BSD, parts, preferred_element_type=jnp.float32)
    of_high, of_low = jnp.split(scores, 2, axis=-1)
    return of_high + of_low


def _score_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _score_in_parts(x, kernel), (x, kernel)


def _score_backward(saved: tuple[jax.Array, jax.Array], d_BSE: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    d_x = jnp.einsum("BSE,DE->BSD", d_BSE, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    d_kernel = jnp.einsum("BSD,BSE->DE", x, d_BSE, preferred_element_type=jnp.float32)
    return d_x.astype(x.dtype), d_kernel.astype(kernel.dtype)


_score_in_parts.defvjp(_score_forward, _score_backward)


class Router(nn.Module):
    """Scores of all experts for each token, in float32, and the selection of some."""

    config: MoeConfig
    embed: int
    kernel_init: Initializer

    def setup(self) -> None:
        dims = (("embed", self.embed), ("router", self.config.num_experts))
        self.kernel = self.param("kernel", declare(self.kernel_init, dims), sizes(dims), jnp.float32)
        zeros = declare(nn.initializers.zeros, dims[1:])
        if self.config.bias_update_rate is not None:
            self.bias = self.param(BIAS, zeros, (self.config.num_experts,), jnp.float32)
        if self.config.biases:
            self.score_bias = self.param(SCORE_BIAS, zeros, (self.config.num_experts,), jnp.float32)

    def __call__(self, x_BSD: jax.Array, used_BS: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The selected experts [B, S, K], int32, and their weights, float32. `used_BS`: see `Documents`."""
        c = self.config
        kernel = constrain(self.kernel, None, None)
        scores = score(x_BSD, kernel)
        if c.biases:
            scores += self.score_bias.astype(jnp.float32)
        scores = constrain(scores, "act_batch", "act_stream", None)
        values = {
            "softmax_topk": lambda: jax.nn.softmax(scores),
            "topk_softmax": lambda: scores,
            "sigmoid": lambda: jax.nn.sigmoid(scores),
        }[c.router]()
        ranked = values if c.bias_update_rate is None else values + self.bias.astype(jnp.float32)
        ranked = self._in_best_groups(jax.lax.stop_gradient(ranked))
        experts = jax.lax.top_k(ranked, c.experts_per_token)[1].astype(jnp.int32)
        experts = checkpoint_name(experts, ROUTED)
        # sums instead of an indexed lookup, whose gradient would be a scatter
        is_selected = experts[..., None] == jnp.arange(c.num_experts)
        weights = jnp.where(is_selected, values[..., None, :], 0).sum(-1)
        if self.is_mutable_collection(AUXILIARY) and not self.is_initializing():
            self._add_losses(scores, is_selected.any(-2), used_BS)
        if c.router == "topk_softmax":
            weights = jax.nn.softmax(weights)
        elif c.normalize:
            weights = weights / (weights.sum(-1, keepdims=True) + _EPSILON)
        return experts, weights * c.routed_scaling_factor

    def _in_best_groups(self, ranked: jax.Array) -> jax.Array:
        """Without the experts of other groups than the best (DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2; of V3,
        those with the largest sum of two)."""
        c = self.config
        if c.num_groups is None or c.groups_per_token is None or c.groups_per_token == c.num_groups:
            return ranked
        grouped = ranked.reshape(*ranked.shape[:-1], c.num_groups, -1)
        best = jax.lax.top_k(grouped, 2 if c.router == "sigmoid" else 1)[0].sum(-1)
        chosen = jax.lax.top_k(best, c.groups_per_token)[1]
        is_chosen = (chosen[..., None] == jnp.arange(c.num_groups)).any(-2)
        return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(ranked.shape)

    def _add_losses(self, scores: jax.Array, is_selected_BSE: jax.Array, used_BS: jax.Array | None) -> None:
        """The balance of each sequence, E sum(f p) with f the share of the selections and p the mean probability of an
        expert (DeepSeek-V3, equations 17 to 20), the z-loss (Zoph et al. 2022, "ST-MoE", equation 5), and metrics."""
        c = self.config
        used = jnp.ones(scores.shape[:2]) if used_BS is None else used_BS.astype(jnp.float32)
        tokens_B = used.sum(1)
        at_least_one = jnp.maximum(tokens_B, 1)[:, None]
        sigmoids = jax.nn.sigmoid(scores) if c.router == "sigmoid" else None
        shares = jax.nn.softmax(scores) if sigmoids is None else sigmoids / sigmoids.sum(-1, keepdims=True)
        selected_BE = jnp.where(is_selected_BSE, used[..., None], 0).sum(1)
        mean_BE = (shares * used[..., None]).sum(1) / at_least_one
        balance_B = (selected_BE / at_least_one * mean_BE).sum(1) * (c.num_experts / c.experts_per_token)
        add_auxiliary(self, "moe/balance_loss", balance_B.sum(), (tokens_B > 0).sum(), c.aux_loss)
        squares = jnp.square(jax.nn.logsumexp(scores, axis=-1))
        add_auxiliary(self, "moe/z_loss", (squares * used).sum(), tokens_B.sum(), c.z_loss)
        entropy = jax.lax.stop_gradient(jax.scipy.special.entr(shares).sum(-1))
        add_auxiliary(self, "moe/router_entropy", (entropy * used).sum(), tokens_B.sum(), 0.0)
        add_load(self, selected_BE.sum(0))


class Moe(nn.Module):
    """[B, S, D] -> [B, S, D]. `width` is the number of hidden units of an expert."""

    config: MoeConfig
    embed: int
    width: int
    activation: str
    kernel_init: Initializer

    def setup(self) -> None:
        c = self.config
        init = self.kernel_init
        self.router = Router(c, self.embed, init)
        gate = Gate(self.activation, c.gate_limit)
        self.experts = Experts(c.num_experts, self.embed, self.width, gate, init, c.biases)
        if c.shared_experts:
            width = c.shared_experts * self.width
            self.shared = Mlp(self.embed, width, self.activation, init, init, False, is_gated=True)
            if c.shared_gate:
                self.shared_gate = Linear((("embed", self.embed),), (("router", 1),), init, False)
        self.drop = nn.Dropout(c.dropout)

    def __call__(self, x: jax.Array, used: jax.Array | None, deterministic: bool) -> jax.Array:
        """`used` [B, S]: see `Documents`."""
        y = self.experts(x, *self.router(x, used))
        if self.config.shared_experts:
            shared = self.shared(x)
            if self.config.shared_gate:
                gate = jax.nn.sigmoid(self.shared_gate(x).astype(jnp.float32))
                shared = (shared * gate).astype(x.dtype)
            y = y + shared
        return self.drop(y, deterministic=deterministic)
