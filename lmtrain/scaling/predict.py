"""What a law predicts: the loss of a config, its cost, and the best size and length for a budget of compute."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmtrain.config.load import LoadedConfig
from lmtrain.models.config import ModelConfig
from lmtrain.run.config import RunConfig
from lmtrain.scaling.fitted import FittedLadder
from lmtrain.scaling.ladder import Ladder, multiplying_parameters, training_flops
from lmtrain.scaling.law import Interval
from lmtrain.scaling.shape import scaled_model


@dataclass(frozen=True)
class Speed:
    """FLOP/s of one device, by `source`."""

    flops_per_second: float
    devices: int
    device: str
    source: str

    def hours(self, flops: float) -> float:
        """Hours on all devices."""
        return flops / (self.flops_per_second * self.devices) / 3600

    def flops(self, hours: float) -> float:
        """FLOPs on all devices in these hours."""
        return 3600 * hours * self.flops_per_second * self.devices


@dataclass(frozen=True)
class Prediction:
    """A run and its predicted loss. Factors are relative to the largest run of the ladder."""

    parameters: int
    tokens: float
    flops: float
    loss: float
    interval: Interval
    size_factor: float
    token_factor: float
    flops_factor: float


@dataclass(frozen=True)
class Best:
    """The best run for a budget of FLOPs. `range` are the N within 0.1 % of the lowest loss; `settings` those of the
    run by dotted name."""

    parameters: float
    range: tuple[float, float]
    prediction: Prediction
    settings: Mapping[str, Any]


def predict(fitted: FittedLadder, model: ModelConfig, tokens: float) -> Prediction:
    """The loss of a model after this number of tokens."""
    vocab_size, largest = fitted.ladder.vocab_size, fitted.largest.point
    parameters, flops = multiplying_parameters(model, vocab_size), training_flops(model, vocab_size) * tokens
    return Prediction(
        parameters,
        tokens,
        flops,
        fitted.fit.law.loss(parameters, tokens),
        fitted.fit.laws.interval(parameters, tokens),
        parameters / largest.parameters,
        tokens / largest.tokens,
        flops / (largest.flops_per_token * largest.tokens),
    )


def tokens_of(config: RunConfig) -> int:
    """Tokens of all steps of a run."""
    return config.trainer.batch_sizes.before(config.trainer.num_train_steps) * config.model.seq_len


def best_run(fitted: FittedLadder, big: LoadedConfig[RunConfig], flops: float) -> Best:
    """The size and the number of tokens with the lowest loss for a budget, as a run with the proportions of `big`.

    The FLOPs of a token are taken in proportion to N, as those of `big` are. Raises `UserError` if no model fits.
    """
    config, ladder = big.config, fitted.ladder
    of_parameter = training_flops(config.model, ladder.vocab_size) / multiplying_parameters(
        config.model, ladder.vocab_size
    )
    product = flops / of_parameter
    parameters, _ = fitted.fit.law.best(product)
    model = scaled_model(config.model, parameters, ladder.vocab_size)
    tokens = flops / training_flops(model, ladder.vocab_size)
    settings, tokens = run_settings(fitted, config, model, tokens)
    return Best(parameters, fitted.fit.law.flat_range(product), predict(fitted, model, tokens), settings)


def run_settings(
    fitted: FittedLadder, config: RunConfig, model: ModelConfig, tokens: float
) -> tuple[dict[str, Any], float]:
    """The settings of a run of this model by the rules of the ladder, and its tokens in whole batches."""
    ladder = fitted.ladder
    grown = ladder.grown(tokens, fitted.runs[-1].point.rate)  # without transfer that of the largest size
    # without a rule for the batch size it is the config's
    batch = grown.setdefault("trainer.train_batch_size", config.trainer.batch_sizes.all[0]) * model.seq_len
    steps = max(1, round(tokens / batch))
    shape = model.model_dump(mode="json", exclude_unset=True)
    settings = {f"model.{name}": value for name, value in shape.items() if value != getattr(config.model, name)}
    settings |= grown | {"trainer.num_train_steps": steps, "optimizer.lr_schedule": ladder.config.schedule}
    if ladder.config.schedule == "wsd":
        settings["optimizer.decay"] = ladder.config.decay
    if (base := ladder.base_sizes) is not None:
        settings["transfer.base"] = base
    return settings, steps * batch


def recipe_differences(ladder: Ladder, config: RunConfig) -> list[str]:
    """Settings in which a config differs from the runs of a ladder, and whose effect the law does not know."""
    ours, theirs = (_recipe(run) for run in (ladder.run, config))
    rules = {"optimizer.lr_schedule": ladder.config.schedule}
    if ladder.config.growth.batch_size:
        rules["trainer.train_batch_size"] = theirs["trainer.train_batch_size"]
    if ladder.config.growth.weight_decay:
        rules["optimizer.weight_decay"] = theirs["optimizer.weight_decay"]
    ours |= rules
    return [f"{name} {theirs[name]} (ladder: {ours[name]})" for name in ours if ours[name] != theirs.get(name)]


def _recipe(config: RunConfig) -> dict[str, Any]:
    return {
        "model.type": config.model.type,
        "model.seq_len": config.model.seq_len,
        "data.tokenizer": config.data.tokenizer,
        "data.train_urls": config.data.train_urls,
        "data.id": config.data.id,
        "data.configs": sorted(config.data.configs or {}),
        "optimizer.type": config.optimizer.type,
        "optimizer.lr_schedule": config.optimizer.lr_schedule,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.warmup": config.optimizer.warmup,
        "optimizer.min_lr_ratio": config.optimizer.min_lr_ratio,
        "trainer.train_batch_size": config.trainer.batch_sizes.all[0],
        "objective.type": config.objective.type,
    }
