"""Settings of a ladder: a file of its own, which names the config of a run."""

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lmtrain.config.section import Section
from lmtrain.config.yaml_loader import parse_value
from lmtrain.runtime.errors import UserError, field_error

Ratio = Annotated[float, Field(gt=0, le=1e5)]


class GrowthConfig(Section):
    """Exponents of settings that grow with the tokens of a run, relative to the smallest size's longest run."""

    batch_size: float = Field(0.0, ge=0, le=1, description="Exponent of trainer.train_batch_size; nanochat has 0.383")
    learning_rate: float = Field(0.0, ge=-1, le=1, description="Exponent of optimizer.learning_rate")
    weight_decay: float = Field(0.0, ge=-1, le=1, description="Exponent of optimizer.weight_decay")


class LadderConfig(Section):
    """A ladder: runs of one config that differ in size and number of tokens."""

    config: str = Field(min_length=1, description="CONFIG of all runs: a file next to the ladder, or as for train")
    overrides: dict[str, Any] = Field({}, description="Settings of all runs, by dotted name, as on the command line")
    sizes: list[dict[str, Any]] = Field(min_length=1, description="Settings of model for each size")
    tokens_per_parameter: list[Ratio] = Field(
        min_length=2, description="Lengths of the runs of each size: ratios of tokens to parameters, ascending"
    )
    schedule: Literal["wsd", "cosine"] = Field(
        "wsd",
        description="Learning-rate schedule: wsd trains one run for each size, from which shorter ones branch off with "
        "a decay; cosine trains each length from the start",
    )
    decay: float = Field(0.2, gt=0, lt=1, description="Decay of wsd, as a fraction of the run")
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        [0], min_length=1, description="Seeds; each size and length runs once for each"
    )
    learning_rates: list[Annotated[float, Field(gt=0, lt=1000)]] = Field(
        [], description="Learning rates to try with the longest run of a size, ascending; []: that of the config"
    )
    transfer: bool = Field(
        True, description="Larger sizes have the learning rate of the smallest, through transfer (muP, CompleteP)"
    )
    rates_at: Literal["smallest", "every"] | None = Field(
        None,
        description="Sizes that try all learning rates; every: to compare them. null: the smallest, without transfer "
        "every one, which then uses its own best",
    )
    growth: GrowthConfig = Field(default_factory=GrowthConfig, description="Settings that grow with tokens")

    @field_validator("tokens_per_parameter", "learning_rates")
    @classmethod
    def _ascending(cls, values: list[float]) -> list[float]:
        if any(later <= earlier for earlier, later in pairwise(values)):
            raise ValueError(f"expected ascending numbers, got {values}")
        if len({f"{value:g}" for value in values}) < len(values):
            raise ValueError(f"two numbers are the same in six digits: {values}")
        return values

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"a seed occurs twice in {seeds}")
        return seeds

    @field_validator("overrides")
    @classmethod
    def _not_ours(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for name in overrides:
            if name in OWN or name.split(".")[0] == "transfer":
                raise ValueError(f"{name}: the ladder sets it")
            if any(own.startswith(f"{name}.") for own in OWN) and overrides[name] is not None:
                raise ValueError(f"{name}: write its settings by dotted name, such as {name}.type")
        return overrides

    @field_validator("sizes")
    @classmethod
    def _sizes_only(cls, sizes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for size in sizes:
            if name := next((name for name in ("type", "seq_len") if name in size), None):
                raise ValueError(f"{name} is no size: one law is for one of these; set it in config or overrides")
        return sizes

    @model_validator(mode="after")
    def _rates_fit(self) -> "LadderConfig":
        if not self.transfer and self.rates_at == "smallest":
            raise field_error("rates_at", "without transfer, learning rates of one size say nothing about another")
        if self.growth.learning_rate and not self.growth.batch_size:
            raise field_error("growth.learning_rate", "grows with a batch size; set growth.batch_size")
        return self

    @property
    def tries_at_all(self) -> bool:
        """Whether all sizes try the learning rates."""
        return self.rates_at == "every" or not self.transfer


# Settings of a run that the ladder sets for each point.
OWN = {
    *("trainer.id", "trainer.seed", "trainer.num_train_steps", "trainer.initialize_from", "trainer.checkpointer.keep"),
    *("optimizer.lr_schedule", "optimizer.decay", "optimizer.learning_rate", "epoch"),
}


def as_overrides(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of dotted name and value in YAML."""
    return [(name, _text(value)) for name, value in settings.items()]


def as_arguments(config: str, settings: Mapping[str, Any]) -> list[str]:
    """The arguments of a command: CONFIG and its overrides."""
    return [config, *(f"--{name}={text}" for name, text in as_overrides(settings))]


def as_command(arguments: Sequence[str]) -> str:
    """A line for a shell."""
    return shlex.join(["lmtrain", *arguments])


def _text(value: Any) -> str:
    """The value in YAML: a text that YAML reads as itself, else JSON, which is YAML."""
    if not isinstance(value, str) or value.startswith("include "):
        return json.dumps(value)
    try:
        return value if parse_value(value, "") == value else json.dumps(value)
    except UserError:
        return json.dumps(value)
