"""Settings of a mixture of experts."""

from typing import Any, Literal

from pydantic import model_validator

from lmtrain.config.section import architecture, identity
from lmtrain.models.base_config import Sizes
from lmtrain.runtime.errors import field_error


class MoeConfig(Sizes):
    """A mixture of experts (MoE): gated MLPs, of which a router selects a few for each token. No token is dropped."""

    num_experts: int = architecture(8, ge=2, description="Number of experts of a layer")
    experts_per_token: int = architecture(2, ge=1, description="Number of experts that the router selects per token")
    intermediate_dim: int | None = architecture(
        None, ge=1, description="Hidden dimension of each expert; null: model.intermediate_dim"
    )
    router: Literal["softmax_topk", "topk_softmax", "sigmoid"] = architecture(
        "softmax_topk",
        description="Weights of the selected experts: softmax_topk (Mixtral, Qwen3, OLMoE), topk_softmax (Granite) or "
        "sigmoid (DeepSeek-V3)",
    )
    normalize: bool = architecture(True, description="Divide the weights of the selected experts by their sum")
    first_dense_layers: int = architecture(
        0, ge=0, description="Number of first layers with one MLP, of model.intermediate_dim, instead (DeepSeek)"
    )
    num_groups: int | None = architecture(
        None,
        ge=1,
        description="Groups of experts, of which a token uses few (DeepSeek-V2 and V3): those with the best expert, or "
        "of router sigmoid the best two; null: none",
    )
    groups_per_token: int | None = architecture(None, ge=1, description="Number of groups that a token can use")
    routed_scaling_factor: float = architecture(
        1.0,
        gt=0,
        description="Factor of the weights (DeepSeek-V3: 2.5); with experts_per_token the layer begins with outputs "
        "like those of one MLP",
    )
    shared_experts: int = architecture(
        0, ge=0, description="Number of experts that all tokens use, in addition to the selected ones (DeepSeek)"
    )
    shared_gate: bool = architecture(
        False, description="Multiply the output of the shared experts by the sigmoid of a projection (Qwen3-Next)"
    )
    biases: bool = architecture(False, description="Add biases to the router and the experts (gpt-oss)")
    gate_limit: float | None = architecture(
        None,
        gt=0,
        description="Limit c of gates g and other hidden units u of experts: with g at most c, and u between -c and c, "
        "g * sigmoid(1.702 g) * (u + 1) (gpt-oss: 7); null: activation_function(g) * u",
    )
    aux_loss: float = identity(
        0.01,
        ge=0,
        description="Coefficient of the load-balancing loss, computed for each sequence; the loss is 1 if the load is "
        "balanced",
    )
    z_loss: float = identity(
        0.001, ge=0, description="Coefficient of the router z-loss: the squared log-sum-exp of a token's scores"
    )
    bias_update_rate: float | None = identity(
        None,
        ge=0,
        description="Balance without a loss: a bias on the selection changes by this per step (DeepSeek-V3: 0.001); "
        "null: no bias",
    )
    dropout: float = identity(0.0, ge=0, lt=1, description="Dropout on the outputs of the experts")

    @model_validator(mode="after")
    def _settings_fit(self) -> "MoeConfig":
        if self.experts_per_token > self.num_experts:
            raise field_error(
                "experts_per_token", f"{self.experts_per_token} is more than num_experts, {self.num_experts}"
            )
        if self.shared_gate and not self.shared_experts:
            raise field_error("shared_gate", "there are no shared experts; set shared_experts, or remove it")
        for name in ("biases", "gate_limit"):
            if getattr(self, name) and self.shared_experts:
                raise field_error(name, "shared experts have none; remove it, or shared_experts")
        if (self.num_groups is None) != (self.groups_per_token is None):
            name = "groups_per_token" if self.groups_per_token is None else "num_groups"
            raise field_error(name, "set both num_groups and groups_per_token, or none of them")
        if self.num_groups is not None and self.groups_per_token is not None:
            size, best = self.num_experts // self.num_groups, 2 if self.router == "sigmoid" else 1
            if self.num_experts % self.num_groups or size < best:
                what = f"{self.num_experts} experts are not {self.num_groups} equal groups of {best} or more"
                raise field_error("num_groups", what)
            least = -(-self.experts_per_token // size)
            if not least <= self.groups_per_token <= self.num_groups:
                raise field_error(
                    "groups_per_token",
                    f"{self.groups_per_token}: use {least} to {self.num_groups} groups of {size} experts for "
                    f"experts_per_token {self.experts_per_token}",
                )
        if self.router == "topk_softmax" and not self.normalize:
            raise field_error("normalize", "router topk_softmax has weights with the sum 1; remove it")
        return self

    def meaning(self) -> dict[str, Any]:
        """The settings that define the meaning of weights in a file, which contain `routed_scaling_factor`."""
        names = {"num_experts", "experts_per_token", "router", "normalize", "shared_experts", "shared_gate"}
        values = self.model_dump(include=names | {"biases", "gate_limit"})
        values["groups"] = (
            None if self.num_groups == self.groups_per_token else (self.num_groups, self.groups_per_token)
        )
        if values["router"] == "softmax_topk" and self.normalize:  # the same function
            values["router"] = "topk_softmax"
        return values | {"has_bias": self.bias_update_rate is not None}
