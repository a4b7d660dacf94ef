"""Settings of Gated DeltaNet layers, and the token mixer that they describe, for FLOPs, plans and caches.
Imports no JAX."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import model_validator

from lmtrain.config.section import architecture
from lmtrain.models.base_config import Sizes
from lmtrain.models.mixer import SequenceSplit, StateArray, linear_flops
from lmtrain.runtime.errors import field_error

# Names of parameters that are float32 in every computation: rounded to 16 bits, they change the decay.
EXACT = ("a_log", "dt_bias")

# Part of the name of all operations between the projections in a compiled program.
SCOPE = "gated_delta_rule"
# Names of the kernels by which plans count the passes: one of each in a pass.
FORWARD, BACKWARD = "gated_delta_forward", "gated_delta_backward"

# Positions of a chunk of the rule: fewer waste a matrix unit of 128 x 128 of a TPU, more need more products.
CHUNK = 128


class GatedDeltaConfig(Sizes):
    """Gated DeltaNet (Qwen3-Next): a state of constant size instead of keys and values of all positions."""

    num_key_heads: int = architecture(16, ge=1, description="Number of heads of queries and keys")
    num_value_heads: int = architecture(32, ge=1, description="Number of heads of values; a multiple of num_key_heads")
    key_head_dim: int = architecture(128, ge=1, description="Head dimension of queries and keys")
    value_head_dim: int = architecture(128, ge=1, description="Head dimension of values")
    negative_eigenvalues: bool = architecture(
        False,
        description="Strengths of up to 2 instead of 1, so that a token can invert what the state has (OLMo Hybrid)",
    )
    norm_epsilon: float | None = architecture(
        None, gt=0, description="Epsilon of the norm of outputs (OLMo Hybrid: 1e-5); null: model.layer_norm_epsilon"
    )
    weight_format: Literal["qwen3_next", "qwen3_5", "olmo_hybrid"] | None = architecture(
        None, description="Names of the layers' tensors in exports and adapters; null: of the first type that fits"
    )
    conv_kernel_dim: int = architecture(
        4, ge=2, le=8, description="Positions that the convolution before the rule sees"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "GatedDeltaConfig":
        if self.num_value_heads % self.num_key_heads:
            raise field_error("num_value_heads", f"must be a multiple of num_key_heads {self.num_key_heads}")
        return self

    def meaning(self, epsilon: float) -> dict[str, Any]:
        """The settings that define the meaning of weights; `epsilon` is that of other norms."""
        return self.model_dump(exclude={"weight_format"}) | {"norm_epsilon": self.norm_epsilon or epsilon}


@dataclass(frozen=True)
class GatedDeltaMixer:
    """The gated delta rule of a layer, with the projections around it."""

    hidden_dim: int
    config: GatedDeltaConfig

    @property
    def forgets(self) -> bool:
        return True

    @property
    def features(self) -> Set[str]:
        return set()

    def flops(self, seq_len: int, causal: bool) -> tuple[float, float]:
        """Those of the projections, the convolution and the rule in chunks of `CHUNK`; none depend on the length."""
        c = self.config
        keys, values = c.num_key_heads * c.key_head_dim, c.num_value_heads * c.value_head_dim
        projections = linear_flops(self.hidden_dim, 2 * keys + 3 * values + 2 * c.num_value_heads)
        convolution = 2 * c.conv_kernel_dim * (2 * keys + values)
        return projections + convolution + self.rule_flops, 0.0

    @property
    def rule_flops(self) -> float:
        """FLOPs of the rule per token, which are in kernels where there is one."""
        c = self.config
        products_of_keys = 4 * CHUNK * c.key_head_dim * c.num_key_heads / c.num_value_heads
        state, chunk = 6 * c.key_head_dim * c.value_head_dim, 4 * CHUNK * c.value_head_dim + CHUNK**2 / 3
        return c.num_value_heads * (state + products_of_keys + chunk)

    def split(self, parts: int, head_parts: int) -> SequenceSplit:
        """Devices exchange what their positions do to the state, in float32 (`devices.py`)."""
        c = self.config
        state = c.num_value_heads * c.key_head_dim * (c.value_head_dim + c.key_head_dim) / head_parts
        text = f"{parts} devices exchange states"
        return SequenceSplit(text, 0.0, has_parts=False, needs_even=False, sent_once=(parts - 1) * 4 * state)

    def state(self, length: int) -> Mapping[str, StateArray]:
        """The state before the last token and after it, since generation may read the last token again; the inputs of
        the convolution; and how many tokens there were."""
        c = self.config
        state = StateArray((c.num_value_heads, c.key_head_dim, c.value_head_dim), "float32")
        channels = 2 * c.num_key_heads * c.key_head_dim + c.num_value_heads * c.value_head_dim
        inputs = StateArray((c.conv_kernel_dim, channels))
        return {"before": state, "after": state, "inputs": inputs, "seen": StateArray((), "int32")}
