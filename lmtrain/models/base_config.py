"""Settings that all model families share (sizes, RoPE, those read from Hugging Face), and the checks between sizes."""

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationInfo, field_validator, model_validator

from lmtrain.config.section import Role, Section, architecture, execution, identity, settings_of
from lmtrain.models.attention.names import AttentionBackend
from lmtrain.models.mixer import AttentionMixer, Mixer, linear_flops, mlp_flops
from lmtrain.runtime.errors import field_error, nearest_divisors


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
    partial_rotary_factor: float = architecture(
        1.0, gt=0, le=1, description="Fraction of a head's dimensions, the first ones, that are rotated (GPT-NeoX)"
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
    truncate: bool = architecture(
        True, description="yarn: round the limits of beta_fast and beta_slow to whole dimensions; false: gpt-oss"
    )
    mscale: float | None = architecture(
        None,
        gt=0,
        description="yarn: with m(a) = 0.1 a log(factor) + 1, queries and keys are multiplied by m(mscale) / "
        "m(mscale_all_dim) (DeepSeek); null: by m(1)",
    )
    mscale_all_dim: float | None = architecture(
        None, gt=0, description="yarn: see mscale; scores of latent attention are multiplied by its m squared, too"
    )

    def meaning(self) -> dict[str, Any]:
        """The settings that this type of scaling uses."""
        values = self.model_dump(include=self._used)
        if self.local_theta is None or (self.type == "default" and self.local_theta == self.theta):
            del values["local_theta"]
        if self.partial_rotary_factor == 1:
            del values["partial_rotary_factor"]
        for name in ("truncate", "mscale", "mscale_all_dim"):
            if values.get(name) in (None, True):
                values.pop(name, None)
        return values

    @property
    def magnitude(self) -> float:
        """The factor of rotated vectors."""
        if self.type != "yarn":
            return 1.0
        return self._yarn(1.0) if self.mscale is None else self._yarn(self.mscale) / self._yarn(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """The factor of the scores of latent attention."""
        return 1.0 if self.mscale_all_dim is None else self._yarn(self.mscale_all_dim) ** 2

    def _yarn(self, scale: float | None) -> float:
        return 0.1 * (scale or 0.0) * math.log(self.factor) + 1

    @property
    def local(self) -> "RopeConfig":
        """The RoPE of sliding layers."""
        if self.local_theta is None:
            return self
        return RopeConfig(theta=self.local_theta, partial_rotary_factor=self.partial_rotary_factor)

    @property
    def _used(self) -> set[str]:
        names: dict[str, list[str]]
        names = {"default": [], "linear": ["factor"], "dynamic": ["factor", "original_seq_len"]}
        names |= {"llama3": ["factor", "original_seq_len", "low_freq_factor", "high_freq_factor"]}
        names |= {"yarn": ["factor", "original_seq_len", "beta_fast", "beta_slow", "truncate"]}
        names["yarn"] += ["mscale", "mscale_all_dim"]
        return {"type", "theta", "local_theta", "partial_rotary_factor", *names[self.type]}

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> "RopeConfig":
        if self.type in ("llama3", "yarn") and self.original_seq_len is None:
            raise field_error("original_seq_len", f"required by rope type {self.type}")
        if self.type == "default" and self.factor != 1:
            raise field_error("factor", "rope type default does not scale; set type to linear, llama3 or yarn")
        for name, field in type(self).model_fields.items():
            if name not in self._used and getattr(self, name) != field.default:
                raise field_error(name, f"not used by rope type {self.type}; remove it")
        if self.mscale is not None and self.mscale_all_dim is None:
            raise field_error("mscale", "has no effect without mscale_all_dim; remove it, or set both")
        if self.high_freq_factor <= self.low_freq_factor:
            raise field_error("high_freq_factor", f"must be above low_freq_factor {self.low_freq_factor}")
        return self


class SameSetting(NamedTuple):
    """`ours` is `theirs` in `config.json`; `default` is the value of a file without it."""

    ours: str
    theirs: str
    default: Any


def to_hf(settings: Sequence[SameSetting], config: BaseModel) -> dict[str, Any]:
    """The values of `config.json`."""
    return {setting.theirs: getattr(config, setting.ours) for setting in settings}


def from_hf(settings: Sequence[SameSetting], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a `config.json` describes."""
    return {setting.ours: values.get(setting.theirs, setting.default) for setting in settings}


POSITIONS = 2**31  # positions are 32-bit integers

RematPolicy = Literal["full", "dots", "dots_no_kernels", "dots_no_batch", "save_attention", "offload"]


class Mixture(NamedTuple):
    """Sizes of a mixture of experts: number of experts, those that a token uses, width of each, and the numbers of the
    layers that have it."""

    experts: int
    per_token: int
    width: int
    layers: tuple[int, ...]


# Larger values are mistakes. Some sizes are lengths of lists, which such values would let exhaust the memory.
MAX_LAYERS, MAX_SIZE, _MAX_PARAMETERS = 10_000, 2**24, 10**16
_NO_SIZES = ("seq_len", "sliding_window")  # have limits of their own, or none


# A number, or numbers by the step from which on they hold, the first of which is 0.
Coefficient = float | tuple[tuple[int, float], ...]


class FurtherLoss(NamedTuple):
    """The cross-entropy of an output of the model, whose target is the token `shift` positions ahead. Its mean times
    `coefficient` is added to the training loss."""

    output: str
    shift: int
    coefficient: Coefficient


class Sizes(Section):
    """A section with sizes of a model, which are bounded."""

    @field_validator("*")
    @classmethod
    def _plausible(cls, value: Any, info: ValidationInfo) -> Any:
        limit = MAX_LAYERS if info.field_name == "num_layers" else MAX_SIZE
        if isinstance(value, int) and value > limit and info.field_name not in _NO_SIZES:
            raise ValueError(f"expected at most {limit:,}")
        return value


class BaseModelConfig(Sizes):
    """Sizes of a stack of transformer blocks, and settings of its execution."""

    seq_len: int = identity(
        1024, ge=2, lt=POSITIONS, description="Sequence length: tokens per training sequence, and the maximum context"
    )
    hidden_dim: int = architecture(
        768, ge=1, description="Hidden dimension: width of the residual stream; a multiple of num_heads"
    )
    num_layers: int = architecture(12, ge=1, description="Number of layers (transformer blocks)")
    num_heads: int = architecture(12, ge=1, description="Number of attention heads per layer")
    initializer_range: float = identity(0.02, gt=0, description="Standard deviation of the initial weight matrices")
    layer_norm_epsilon: float = architecture(1e-5, gt=0, description="Epsilon of every norm, added to the variance")
    pad_vocab_to_multiple_of: int = identity(
        128, ge=1, description="Pad the rows of the embedding and the head to a multiple of this, to split over devices"
    )
    gradient_checkpointing: bool | RematPolicy = execution(
        True,
        description="Recompute activations in the backward pass to save memory. true, full: "
        "all of a block; dots: all but matrix products and attention; dots_no_kernels: all but matrix products; "
        "dots_no_batch: all but products with weights; save_attention: all but attention; offload: as full, with the "
        "inputs of blocks in host memory; false: nothing",
    )
    scan_layers: bool = execution(
        True, description="Scan over layers: compile one block and loop over it; false unrolls the loop"
    )
    attn_backend: AttentionBackend = execution(
        "auto", description="Attention backend; auto takes the fastest that supports the model, and logs which"
    )
    flash_attention_block_size: int | None = execution(
        None,
        ge=16,
        description="Block size of attention in tokens, for attention backends that use one; null: chosen by length "
        "for splash, 512 for blockwise",
    )

    @model_validator(mode="after")
    def _plausible_in_all(self) -> "BaseModelConfig":
        if self.num_layers * self.hidden_dim**2 > _MAX_PARAMETERS:
            raise field_error(
                "hidden_dim", f"{self.num_layers:,} layers of {self.hidden_dim:,} have more than 10^17 parameters"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> "BaseModelConfig":
        if getattr(self, "head_dim", None) is None and self.hidden_dim % self.num_heads:
            near = " or ".join(map(str, nearest_divisors(self.hidden_dim, self.num_heads)))
            raise field_error(
                "num_heads",
                f"{self.num_heads} does not divide hidden_dim {self.hidden_dim}; num_heads could be {near}",
            )
        return self

    def padded(self, vocab_size: int) -> int:
        """Rows of the embedding for this vocabulary size, padded."""
        multiple = self.pad_vocab_to_multiple_of
        return -(-vocab_size // multiple) * multiple

    def meaning(self) -> dict[str, Any]:
        """The settings that define the meaning of the weights, with defaults filled in: equal for equal models.

        Excluded are settings that may differ between training and use: length, dropout, initial values, execution.
        """
        return self.model_dump(include=settings_of(type(self), Role.ARCHITECTURE))

    def computation(self) -> dict[str, Any]:
        """All settings but those of execution, with defaults filled in: if they and the parameters of two models are
        equal, the models compute the same, except for rounding."""
        return self.model_dump(mode="json", include=settings_of(type(self), *set(Role) - {Role.EXECUTION}))

    def build(self, vocab_size: int, attention: str) -> Any:
        """The Linen module of this config, with the attention kernel of a name."""
        family = type(self).__name__.removesuffix("Config")
        module = importlib.import_module(type(self).__module__.removesuffix("config") + "model")
        return getattr(module, f"{family}LM")(self, vocab_size, attention)

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.hidden_dim // self.num_heads

    @property
    def score_scale(self) -> float:
        """Attention scores are the products of queries and keys, multiplied by this."""
        return self.head_width**-0.5

    def initial_range(self, inputs: int, adds: bool = False) -> float:
        """Standard deviation of the initial values of a matrix with this number of inputs. `adds`: its results are
        added to the residual stream."""
        return self.initializer_range

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads

    @property
    def mlp_dim(self) -> int:
        """Hidden dimension of the MLP."""
        raise NotImplementedError

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices of the MLP: 3 with a gate."""
        return 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Maximum number of keys that a query sees in each layer; None: all before it."""
        return (None,) * self.num_layers

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What mixes the positions of each layer."""
        return tuple(
            AttentionMixer(
                hidden_dim=self.hidden_dim,
                heads=self.num_heads,
                kv_heads=self.kv_heads,
                head_width=self.head_width,
                window=window,
                is_gated=getattr(self, "attention_gate", False),
            )
            for window in self.windows
        )

    @property
    def all_mixers(self) -> tuple[Mixer, ...]:
        """Those of the layers, and others of the model."""
        return self.mixers

    @property
    def mlp_flops(self) -> float:
        """FLOPs of the MLP per token, mean over the layers; of a mixture of experts, those of the selected ones."""
        return mlp_flops(self.hidden_dim, self.mlp_dim, self.mlp_matrices)

    def num_flops_per_token(self, vocab_size: int, causal: bool = False) -> float:
        """FLOPs of a forward pass per token; see `lmtrain/models/mixer.py`."""
        mixed = sum(sum(mixer.flops(self.seq_len, causal)) for mixer in self.all_mixers)
        return mixed + self.num_layers * self.mlp_flops + linear_flops(self.hidden_dim, vocab_size)  # and the head

    def attention_flops(self, full: float, causal: float) -> tuple[float, float]:
        """The part of FLOPs per token that grows with the number of keys: of `full` and of `causal` attention."""
        keys, seen = (sum(m.flops(self.seq_len, causal)[1] for m in self.all_mixers) for causal in (False, True))
        if keys == seen:
            return 0.0, 0.0
        each = (full - causal) / (keys - seen)
        return each * keys, each * seen

    @property
    def mixture(self) -> Mixture | None:
        """The mixture of experts; None if the model has none."""
        return None

    @property
    def further_losses(self) -> Mapping[str, FurtherLoss]:
        """The losses of the outputs besides the main one, by the name under which they are logged, `train/<name>`."""
        return {}

    @property
    def balance_rate(self) -> float | None:
        """The rate of the biases that balance the load of experts; None if there are none."""
        return None

    @property
    def obstacles(self) -> Mapping[str, str]:
        """Why settings of a run do not fit this model, by their names: lora, transfer, optimizer.qk_clip, and
        optimizer.type for sophia-h."""
        return {}

    @property
    def attention_needs(self) -> set[str]:
        """The features that attention needs, as keys of `FEATURES` in `models/attention/names.py`."""
        return set[str]().union(*(mixer.features for mixer in self.all_mixers))
