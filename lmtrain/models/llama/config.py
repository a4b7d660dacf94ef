"""Settings of the Llama family."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from pydantic import model_validator

from lmtrain.config.section import architecture, identity
from lmtrain.models.base_config import (
    POSITIONS,
    BaseModelConfig,
    Coefficient,
    FurtherLoss,
    Mixture,
    RopeConfig,
    Sizes,
)
from lmtrain.models.gated_delta.config import GatedDeltaConfig, GatedDeltaMixer
from lmtrain.models.latent.config import LatentAttentionConfig, LatentMixer
from lmtrain.models.llama.layer_kinds import LayerEntry, LayerKind, shortest_period
from lmtrain.models.mixer import Mixer, linear_flops, mlp_flops
from lmtrain.models.moe.config import MoeConfig
from lmtrain.runtime.errors import field_error, nearest_divisors


class MtpConfig(Sizes):
    """Modules that predict further tokens in training (DeepSeek-V3); evaluation leaves them out."""

    num_modules: int = architecture(1, ge=1, description="Number of modules, each of which predicts one token more")
    loss_weight: float | tuple[tuple[int, float], ...] = identity(
        0.3,
        description="Weight of the mean of their losses, or pairs of a step and the weight from it on: [[0, 0.3], "
        "[20000, 0.1]]",
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> "MtpConfig":
        steps, weights = zip(*self._weights, strict=True) if self._weights else ((), ())
        if not steps or steps[0] != 0 or any(one >= other for one, other in pairwise(steps)):
            raise field_error("loss_weight", "steps have to begin with 0 and increase")
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise field_error("loss_weight", "weights have to be 0 or more, and one of them above 0; or remove mtp")
        return self

    @property
    def _weights(self) -> tuple[tuple[int, float], ...]:
        return self.loss_weight if isinstance(self.loss_weight, tuple) else ((0, self.loss_weight),)

    @property
    def coefficient(self) -> Coefficient:
        """That of the loss of each module."""
        return tuple((step, weight / self.num_modules) for step, weight in self._weights)


# Settings of other attention than latent attention.
_NOT_LATENT = (
    *("attention_gate", "attention_sinks", "attention_logit_cap", "qk_norm", "query_pre_attn_scalar", "use_qkv_bias"),
    *("head_dim", "num_kv_heads"),
)


class LlamaConfig(BaseModelConfig):
    """Llama; the defaults are the 7B model."""

    type: Literal["llama"] = architecture("llama", description="Model family: Llama")
    seq_len: int = identity(
        2048, ge=2, lt=POSITIONS, description="Sequence length: tokens per training sequence, and the maximum context"
    )
    hidden_dim: int = architecture(4096, ge=1, description="Hidden dimension: width of the residual stream")
    intermediate_dim: int = architecture(11008, ge=1, description="Hidden dimension of the gated MLP")
    num_layers: int = architecture(32, ge=1, description="Number of layers (transformer blocks)")
    num_heads: int = architecture(32, ge=1, description="Number of query heads per layer")
    num_kv_heads: int | None = architecture(None, ge=1, description="Number of key and value heads; null: num_heads")
    head_dim: int | None = architecture(None, ge=1, description="Head dimension; null: hidden_dim / num_heads")
    activation_function: Literal["silu", "gelu", "gelu_new", "relu", "relu2"] = architecture(
        "silu", description="Activation function of the MLP's gate; without a gate, of its hidden units"
    )
    gated_mlp: bool = architecture(True, description="Multiply the MLP's hidden units by a gate; false: as in Arcee")
    use_bias: bool = architecture(False, description="Add biases to the linear layers of attention")
    use_qkv_bias: bool = architecture(False, description="Add biases to queries, keys and values only (Qwen2)")
    use_mlp_bias: bool = architecture(False, description="Add biases to the linear layers of the MLP")
    use_head_bias: bool = architecture(False, description="Add a bias to the logits")
    sliding_window: int | None = architecture(
        None,
        ge=1,
        description="Sliding window: maximum number of tokens that a query sees (Mistral), in the sliding layers of "
        "layer_pattern if that is set; null: all before it",
    )
    layer_pattern: tuple[LayerEntry, ...] | None = architecture(
        None,
        description="Layers that differ: the kinds of the first layers, which repeat over the depth, such as "
        "[sliding, sliding, sliding, full] (OLMo 3); null: all layers are alike",
    )
    attention_logit_cap: float | None = architecture(
        None, gt=0, description="Cap on attention scores s: cap * tanh(s / cap) (Gemma 2); null: none"
    )
    final_logit_cap: float | None = architecture(
        None, gt=0, description="Cap on the logits l of the head, by final_logit_cap_type; null: none"
    )
    final_logit_cap_type: Literal["tanh", "rsqrt"] = architecture(
        "tanh",
        description="tanh: cap * tanh(l / cap) (Gemma 2); rsqrt: cap * l / sqrt(l^2 + cap^2) (modded-nanogpt)",
    )
    query_pre_attn_scalar: float | None = architecture(
        None, gt=0, description="Attention scores are multiplied by this ** -0.5 (Gemma 2, Gemma 3); null: head_dim"
    )
    qk_norm: Literal["none", "head", "all", "weightless"] = architecture(
        "none",
        description="Normalization of queries and keys: head: within each head (Qwen3); all: over all heads (OLMo2); "
        "weightless: within each head, without weights",
    )
    attention_gate: bool = architecture(
        False, description="Multiply the outputs of attention by the sigmoid of a projection of its input (Qwen3-Next)"
    )
    attention_sinks: bool = architecture(
        False,
        description="Add a learned score of each head to the softmax of attention, so that the weights of what a token "
        "sees can be small (gpt-oss)",
    )
    norm_position: Literal["pre", "post", "both"] = architecture(
        "pre",
        description="Position of norms: pre: before attention and MLP; post: on their outputs (OLMo2); both (Gemma 2)",
    )
    norm_offset: bool = architecture(False, description="Scale norms by 1 + weight (Gemma)")
    scale_embeddings: bool = architecture(False, description="Multiply the embeddings by sqrt(hidden_dim) (Gemma)")
    embedding_norm: bool = architecture(False, description="Normalize the embeddings (modded-nanogpt)")
    tie_word_embeddings: bool = architecture(False, description="Tie the output head to the embedding table")
    rope: RopeConfig = architecture(default_factory=RopeConfig, description="Rotary positions")
    linear_attention: GatedDeltaConfig | None = architecture(
        None, description="Gated DeltaNet, in the linear layers of layer_pattern"
    )
    latent_attention: LatentAttentionConfig | None = architecture(
        None, description="Latent attention (MLA) in place of attention; {} for the sizes of DeepSeek-V2-Lite"
    )
    moe: MoeConfig | None = architecture(
        None,
        description="Mixture of experts (MoE) in place of the MLP, in all layers that layer_pattern does not exclude",
    )
    mtp: MtpConfig | None = architecture(
        None, description="Predict several tokens in training (MTP); {} for one more; null: only the next one"
    )

    @model_validator(mode="after")
    def _kv_heads_divide(self) -> "LlamaConfig":
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            near = " or ".join(map(str, nearest_divisors(self.num_heads, self.num_kv_heads)))
            raise field_error(
                "num_kv_heads",
                f"{self.num_kv_heads} does not divide num_heads {self.num_heads}; num_kv_heads could be {near}",
            )
        return self

    @model_validator(mode="after")
    def _head_size_is_even(self) -> "LlamaConfig":
        if self.head_width % 2 and self.latent_attention is None:
            raise field_error("head_dim", f"rotary embeddings require an even head dimension; {self.head_width} is odd")
        return self

    @model_validator(mode="after")
    def _layers_use_their_settings(self) -> "LlamaConfig":
        pattern = self.layer_pattern
        if pattern == ():
            raise field_error("layer_pattern", "has no layers; remove it, or list kinds of layers")
        if pattern is not None and len(pattern) > self.num_layers:
            raise field_error("layer_pattern", f"has {len(pattern)} layers, the model only {self.num_layers}")
        has_sliding = any(kind.attention == "sliding" for kind in self.pattern)
        if has_sliding and self.sliding_window is None:
            raise field_error("layer_pattern", "has sliding layers: set sliding_window to the number of keys they see")
        if self.sliding_window is not None and not has_sliding:
            raise field_error("sliding_window", "no layer of layer_pattern is sliding; remove it, or add such layers")
        has_linear = any(kind.attention == "linear" for kind in self.pattern)
        if has_linear and self.linear_attention is None:
            raise field_error(
                "layer_pattern", "has linear layers: set linear_attention, {} for the sizes of Qwen3-Next"
            )
        if self.linear_attention is not None and not has_linear:
            raise field_error("linear_attention", "no layer of layer_pattern is linear; remove it, or add such layers")
        is_unused = self.moe is not None and self.moe.gate_limit is not None and not self.dense_layers
        if is_unused and self.activation_function != "silu":
            raise field_error("activation_function", "moe.gate_limit replaces it in all layers; remove one of them")
        if all(kind.attention == "linear" for kind in self.pattern):
            unused = {"attention_sinks": False, "attention_logit_cap": None, "use_qkv_bias": False}
            for name, neutral in unused.items():
                if getattr(self, name) != neutral:
                    raise field_error(name, "no layer of layer_pattern has attention; remove it, or add such layers")
        rotated = {kind.attention for kind in self.pattern if kind.rope and kind.attention != "linear"}
        if self.rope.local_theta is not None and "sliding" not in rotated:
            raise field_error("rope", "local_theta is for sliding layers with RoPE, which layer_pattern does not have")
        if rotated == {"sliding"} and self.rope.local_theta is not None:
            raise field_error("rope", "only sliding layers have RoPE: set theta instead of local_theta")
        if self.rope.partial_rotary_factor < 1 and self.head_width * self.rope.partial_rotary_factor % 2:
            rotated_dims = self.head_width * self.rope.partial_rotary_factor
            raise field_error("rope", f"partial_rotary_factor rotates {rotated_dims:g} dimensions; use an even number")
        if self.rope != RopeConfig() and not rotated:
            raise field_error("rope", "no layer of layer_pattern has RoPE; remove it")
        return self

    @model_validator(mode="after")
    def _latent_attention_fits(self) -> "LlamaConfig":
        if self.latent_attention is None:
            if self.rope.mscale_all_dim is not None and self.rope.mscale is None:
                raise field_error("rope", "mscale_all_dim without mscale is for latent_attention; remove it")
            return self
        if not self.attention_layers:
            raise field_error("latent_attention", "no layer of layer_pattern has attention; remove it")
        for name in _NOT_LATENT:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise field_error(name, "latent attention (latent_attention) has none; remove it")
        if self.rope.partial_rotary_factor != 1:
            raise field_error("rope", "partial_rotary_factor: latent_attention.qk_rope_head_dim says what is rotated")
        return self

    @model_validator(mode="after")
    def _modules_have_targets(self) -> "LlamaConfig":
        if self.mtp is not None and self.mtp.num_modules > self.seq_len - 2:
            raise field_error("mtp", f"num_modules: sequences of {self.seq_len} tokens have {self.seq_len - 2} at most")
        return self

    @model_validator(mode="after")
    def _norms_fit(self) -> "LlamaConfig":
        if self.norm_position == "both" and any(kind.norm_position for kind in self.layer_pattern or ()):
            raise field_error("layer_pattern", "norm_position of a layer needs a model.norm_position of pre or post")
        return self

    @model_validator(mode="after")
    def _cap_is_used(self) -> "LlamaConfig":
        if self.final_logit_cap is None and self.final_logit_cap_type != "tanh":
            raise field_error("final_logit_cap_type", "has no effect without final_logit_cap; set it, or remove this")
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> "LlamaConfig":
        kinds = {kind.mlp for kind in self.kinds}
        if self.moe is None and "moe" in kinds:
            raise field_error("layer_pattern", "has layers with a mixture of experts: set moe")
        if self.moe is None:
            return self
        if self.moe.first_dense_layers >= self.num_layers:
            raise field_error("moe", f"first_dense_layers: the model has only {self.num_layers} layers")
        if "moe" not in kinds:
            raise field_error("moe", "no layer of layer_pattern is a mixture of experts; remove it, or add such layers")
        if not self.gated_mlp or (self.use_mlp_bias and kinds == {"moe"}):
            name, value = ("gated_mlp", "false") if not self.gated_mlp else ("use_mlp_bias", "true")
            raise field_error(name, f"{value}: experts have a gate and no biases; remove it")
        return self

    @property
    def pattern(self) -> tuple[LayerKind, ...]:
        """The kinds of the first layers, which repeat over the depth, with `mlp` and `norm_position` filled in."""
        default = LayerKind(attention="full" if self.sliding_window is None else "sliding")
        mlp: Literal["dense", "moe"] = "dense" if self.moe is None else "moe"
        return tuple(
            kind.model_copy(update={"mlp": kind.mlp or mlp, "norm_position": kind.norm_position or self.norm_position})
            for kind in self.layer_pattern or (default,)
        )

    @property
    def kinds(self) -> list[LayerKind]:
        """The kind of each layer."""
        kinds = [self.pattern[layer % len(self.pattern)] for layer in range(self.num_layers)]
        dense = self.moe.first_dense_layers if self.moe else 0
        return [kind.model_copy(update={"mlp": "dense"}) for kind in kinds[:dense]] + kinds[dense:]

    def of_kind(self, kind: LayerKind) -> "LlamaConfig":
        """The config of a block of this kind: `pattern` is the kind alone."""
        return self.model_copy(update={"layer_pattern": (kind,)})

    def meaning(self) -> dict[str, Any]:
        values = super().meaning()
        period = shortest_period(self.kinds)
        are_alike = len(period) == 1 and period[0].rope
        moe = None if self.moe is None else self.moe.meaning() | {"intermediate_dim": self.expert_dim}
        linear = None if self.linear_attention is None else self.linear_attention.meaning(self.layer_norm_epsilon)
        latent = self.latent_attention
        return values | {
            "linear_attention": linear,
            "mtp": self._mtp_modules,
            "latent_attention": None if latent is None else latent.model_dump(exclude={"rope_interleave"}),
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_width,
            "rope": self.rope.meaning(),
            "layer_pattern": None if are_alike else [kind.model_dump() for kind in period],
            "norm_position": period[0].norm_position if are_alike else None,
            "query_pre_attn_scalar": self.query_scalar,
            "intermediate_dim": self.intermediate_dim if self.dense_layers else None,
            "moe": moe,
        }

    @property
    def head_width(self) -> int:
        """Head dimension, of queries and keys."""
        if self.latent_attention is not None:
            return self.latent_attention.head_width
        return self.head_dim or self.hidden_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def has_dropout(self) -> bool:
        return self.moe is not None and self.moe.dropout > 0

    @property
    def mlp_dim(self) -> int:
        return self.intermediate_dim

    @property
    def expert_dim(self) -> int:
        """Hidden dimension of an expert."""
        return (self.moe and self.moe.intermediate_dim) or self.intermediate_dim

    @property
    def mixture(self) -> Mixture | None:
        if self.moe is None:
            return None
        return Mixture(self.moe.num_experts, self.moe.experts_per_token, self.expert_dim, self.expert_layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a mixture of experts."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.mlp == "moe")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with Gated DeltaNet in place of attention."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.attention == "linear")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with attention."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.attention != "linear")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with one MLP."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.mlp == "dense")

    @property
    def balance_rate(self) -> float | None:
        return self.moe.bias_update_rate if self.moe else None

    @property
    def mlp_flops(self) -> float:
        return sum(map(self._mlp_flops_of, self.kinds)) / self.num_layers

    def _mlp_flops_of(self, kind: LayerKind) -> float:
        """FLOPs per token of the MLP of a layer."""
        if self.moe is None or kind.mlp == "dense":
            return super().mlp_flops
        width, experts = self.expert_dim, self.moe.experts_per_token + self.moe.shared_experts
        scores = self.moe.num_experts + self.moe.shared_gate
        return experts * mlp_flops(self.hidden_dim, width, 3) + linear_flops(self.hidden_dim, scores)

    def num_flops_per_token(self, vocab_size: int, causal: bool = False) -> float:
        """FLOPs of a forward pass per token, with those of `mtp`; see `lmtrain/models/mixer.py`."""
        module = self._mlp_flops_of(self.kinds[-1]) + linear_flops(self.hidden_dim, 2 * self.hidden_dim + vocab_size)
        return super().num_flops_per_token(vocab_size, causal) + self._mtp_modules * module

    @property
    def _mtp_modules(self) -> int:
        return 0 if self.mtp is None else self.mtp.num_modules

    @property
    def all_mixers(self) -> tuple[Mixer, ...]:
        return self.mixers + self.mixers[-1:] * self._mtp_modules

    @property
    def further_losses(self) -> Mapping[str, FurtherLoss]:
        if self.mtp is None:
            return {}
        numbers = range(1, self.mtp.num_modules + 1)
        return {f"mtp_{k}_loss": FurtherLoss(f"mtp_{k}", 1 + k, self.mtp.coefficient) for k in numbers}

    @property
    def query_scalar(self) -> float:
        """Attention scores are multiplied by this ** -0.5."""
        return self.query_pre_attn_scalar or self.head_width

    @property
    def score_scale(self) -> float:
        scale: float = self.query_scalar**-0.5
        return scale if self.latent_attention is None else scale * self.rope.score_factor

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated_mlp else 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if kind.attention == "sliding" else None for kind in self.kinds)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        attention, own, latent = super().mixers, self.linear_attention, self.latent_attention
        if latent is not None:
            attention = tuple(LatentMixer(**vars(each), latent=latent) for each in attention)
        linear = None if own is None else GatedDeltaMixer(self.hidden_dim, own)
        kinds = zip(self.kinds, attention, strict=True)
        return tuple(linear if linear is not None and kind.attention == "linear" else each for kind, each in kinds)

    @property
    def obstacles(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        if self.qk_norm != "none":
            found["optimizer.qk_clip"] = "has no effect with model.qk_norm, which scales scores; remove one"
        if self.attention_gate:
            found["transfer"] = "model.attention_gate has no transfer rule; remove one"
            found.setdefault("optimizer.qk_clip", "would scale gates with queries (model.attention_gate); set qk_norm")
        if self.latent_attention is not None:
            found["transfer"] = "model.latent_attention has no transfer rule; remove one"
            found["optimizer.qk_clip"] = "has no rule for latent attention (model.latent_attention); remove it"
        if self.mtp is not None:
            found["transfer"] = "model.mtp has no transfer rule; remove one"
        if self.attention_sinks:
            found["transfer"] = "model.attention_sinks has no transfer rule; remove one"
        if self.moe is not None and self.moe.biases:
            found["transfer"] = "model.moe.biases has no transfer rule; remove one"
        lacking = "linear layers" if self.linear_attention else "experts" if self.moe else ""
        if lacking:
            found["optimizer.type"] = f"sophia-h needs second derivatives, which {lacking} lack; use sophia-g"
        if self.linear_attention is not None:
            found["transfer"] = "linear layers (model.linear_attention) have no transfer rule; remove one"
        return found

    @property
    def attention_needs(self) -> set[str]:
        own = {"cap": self.attention_logit_cap is not None, "sinks": self.attention_sinks}
        return super().attention_needs | {name for name, is_needed in own.items() if is_needed}
