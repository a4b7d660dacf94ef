"""Settings of rotary position embeddings (RoPE), for the families that have them."""

from typing import Any, Literal

from pydantic import model_validator

from lmtrain.config.errors import field_error
from lmtrain.config.section import Section
from lmtrain.config.setting import architecture


class RopeConfig(Section):
    """Rotary position embeddings, and their scaling beyond the trained length."""

    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = architecture(
        "default", description="Type of RoPE scaling to longer contexts; the type default does not scale"
    )
    theta: float = architecture(10_000.0, gt=0, description="Base of the RoPE frequencies")
    local_theta: float | None = architecture(
        None,
        gt=0,
        description="Base of the RoPE frequencies of sliding layers, which are not scaled (Gemma 3, OLMo 3); null: the "
        "same RoPE in all layers",
    )
    factor: float = architecture(1.0, ge=1, description="Scaling factor: new context length / trained length")
    original_seq_len: int | None = architecture(
        None, ge=1, description="Trained context length in tokens; required by llama3 and yarn"
    )
    low_freq_factor: float = architecture(
        1.0, gt=0, description="llama3: wavelengths above original_seq_len / this are scaled"
    )
    high_freq_factor: float = architecture(
        4.0, gt=0, description="llama3: wavelengths below original_seq_len / this are kept"
    )
    beta_fast: float = architecture(32.0, gt=0, description="yarn: frequencies with more rotations than this are kept")
    beta_slow: float = architecture(
        1.0, gt=0, description="yarn: frequencies with fewer rotations than this are fully scaled"
    )

    def meaning(self) -> dict[str, Any]:
        """The settings that this type of scaling uses."""
        values = self.model_dump(include=self._used)
        if self.local_theta is None or (self.type == "default" and self.local_theta == self.theta):
            del values["local_theta"]
        return values

    @property
    def local(self) -> "RopeConfig":
        """The RoPE of sliding layers."""
        return self if self.local_theta is None else RopeConfig(theta=self.local_theta)

    @property
    def _used(self) -> set[str]:
        names: dict[str, list[str]]
        names = {"default": [], "linear": ["factor"], "dynamic": ["factor", "original_seq_len"]}
        names |= {"llama3": ["factor", "original_seq_len", "low_freq_factor", "high_freq_factor"]}
        names |= {"yarn": ["factor", "original_seq_len", "beta_fast", "beta_slow"]}
        return {"type", "theta", "local_theta", *names[self.type]}

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> "RopeConfig":
        if self.type in ("llama3", "yarn") and self.original_seq_len is None:
            raise field_error("original_seq_len", f"required by rope type {self.type}")
        if self.type == "default" and self.factor != 1:
            raise field_error("factor", "rope type default does not scale; set type to linear, llama3 or yarn")
        for name, field in type(self).model_fields.items():
            if name not in self._used and getattr(self, name) != field.default:
                raise field_error(name, f"not used by rope type {self.type}; remove it")
        if self.high_freq_factor <= self.low_freq_factor:
            raise field_error("high_freq_factor", f"must be above low_freq_factor {self.low_freq_factor}")
        return self
