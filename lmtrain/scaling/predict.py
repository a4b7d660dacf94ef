"""What a law predicts: the loss of a config, its cost, and the best size, shape and length for a budget of compute."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from lmtrain.models.config import ModelConfig
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, counted
from lmtrain.scaling.fit import Fit, Interval
from lmtrain.scaling.fitted import FittedLadder
from lmtrain.scaling.ladder import Ladder, check_start, multiplying_parameters, training_flops
from lmtrain.scaling.results import compared, described
from lmtrain.transfer.config import sizes_of

_MAX_LAYERS = 256
_MAX_RATIO = 1.2  # of two ratios of width to depth


def scaled_model(model: ModelConfig, parameters: float, vocab_size: int) -> ModelConfig:
    """The model closest to this number of parameters with the proportions of `model`.

    The ratio of width to depth is within a fifth of that of `model` if whole groups of heads allow it, each head as
    wide as before; else a factor on the number of parameters counts as much as its square on the ratio. MLPs are in
    proportion to the width, in multiples of 128 where they are wider than 2,048. Raises `UserError` if no depth
    fits the model's settings.
    """
    best: ModelConfig | None = None
    distance = lowest = math.inf
    shapes = list(_shapes(model, parameters / multiplying_parameters(model, vocab_size)))
    for layers, heads in shapes:
        try:
            found = type(model).model_validate(_settings(model, layers, heads))
        except ValidationError:  # such as a layer_pattern that does not divide the number of layers
            continue
        size = abs(math.log(multiplying_parameters(found, vocab_size) / parameters))
        ratio = abs(math.log(heads / layers / (model.num_heads / model.num_layers)))
        cost = 2 * size + max(0.0, ratio - math.log(_MAX_RATIO))
        if cost < lowest:
            best, distance, lowest = found, size, cost
    if shapes and best is None:
        raise UserError("no other number of layers fits the model's settings, such as layer_pattern")
    if best is None or distance > math.log(2):
        raise UserError(
            f"no model of at most {_MAX_LAYERS} layers with these proportions has about {parameters:.3g} parameters; "
            "add --config of a model that is nearer to it"
        )
    return best


def _shapes(model: ModelConfig, ratio: float) -> Iterator[tuple[int, int]]:
    """Numbers of layers and heads with about the proportions of `model` and `ratio` times its parameters, in groups of
    heads that share keys; of many heads in multiples of eight, which devices divide."""
    group = model.num_heads // math.gcd(model.num_heads, model.kv_heads)
    for layers in range(1, _MAX_LAYERS + 1):
        nearest = max(1.0, model.num_heads / model.num_layers * layers)
        # parameters of blocks are in proportion to the layers and the square of the width; those of the head are less
        wanted = model.num_heads * math.sqrt(ratio * model.num_layers / layers)
        if not nearest / 3 < wanted < 3 * nearest:
            continue
        heads = min(max(wanted, nearest / _MAX_RATIO), nearest * _MAX_RATIO)
        step = group if heads <= 16 else math.lcm(group, 8)
        first = math.floor(heads / step)
        for number in range(max(1, first - 1), first + 3):
            yield layers, number * step


def _settings(model: ModelConfig, layers: int, heads: int) -> dict[str, Any]:
    """The settings that `model` sets, with those of its sizes for these numbers of layers and heads."""
    settings = model.model_dump(exclude_unset=True)
    kv_heads = model.kv_heads
    width = round(heads * model.hidden_dim / model.num_heads)
    settings |= {"num_layers": layers, "num_heads": heads, "hidden_dim": width}
    if settings.get("num_kv_heads") is not None:
        settings["num_kv_heads"] = max(1, heads * kv_heads // model.num_heads)
    if settings.get("intermediate_dim") is not None:
        settings["intermediate_dim"] = _proportional(settings["intermediate_dim"], width / model.hidden_dim)
    if (moe := settings.get("moe")) and moe.get("intermediate_dim"):
        moe["intermediate_dim"] = _proportional(moe["intermediate_dim"], width / model.hidden_dim)
    return settings


def _proportional(size: int, ratio: float) -> int:
    multiple = 128 if size * ratio > 2048 else 8
    return max(multiple, multiple * round(size * ratio / multiple))


# Factors beyond the ladder's largest N, D and FLOPs, up to which a law says more than a direction.
FAR = {"N": 100, "D": 100, "FLOPs": 10_000}
# The largest factor between the ends of the interval of the best N, with which the law identifies it.
_MAX_SPAN = 10
_MIN_STEPS = 100


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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

    @property
    def is_far(self) -> bool:
        """Whether it is far outside the ladder."""
        factors = self.size_factor, self.token_factor, self.flops_factor
        return any(factor > far for factor, far in zip(factors, FAR.values(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best run for a budget of FLOPs. `interval` is that of its N by the laws of samples, `range` are the N within
    0.1 % of the lowest loss; `settings` those of the run by dotted name."""

    parameters: float
    interval: Interval
    range: tuple[float, float]
    prediction: Prediction
    settings: Mapping[str, Any]


def predict(fitted: FittedLadder, model: ModelConfig, tokens: float) -> Prediction:
    """The loss of a model after this number of tokens."""
    vocab_size, largest = fitted.ladder.vocab_size, fitted.largest.point
    parameters, flops = multiplying_parameters(model, vocab_size), training_flops(model, vocab_size) * tokens
    return Prediction(
        parameters=parameters,
        tokens=tokens,
        flops=flops,
        loss=fitted.fit.law.loss(parameters, tokens),
        interval=fitted.fit.laws.interval(parameters, tokens),
        size_factor=parameters / largest.parameters,
        token_factor=tokens / largest.tokens,
        flops_factor=flops / (largest.flops_per_token * largest.tokens),
    )


def tokens_of(config: RunConfig) -> int:
    """Tokens of all steps of a run."""
    return config.trainer.batch_sizes.before(config.trainer.num_train_steps) * config.model.seq_len


def best_run(fitted: FittedLadder, config: RunConfig, shape: ModelConfig, flops: float) -> Best:
    """The size and the number of tokens with the lowest loss for a budget, as a run of `config` with a model that has
    the proportions of `shape`.

    The FLOPs of a token are taken in proportion to N, as those of `shape` are. Raises `UserError` if the law does not
    identify the best size, if it is smaller than the ladder or far beyond it, and if no model or number of steps fits.
    """
    ladder = fitted.ladder
    product = flops * multiplying_parameters(shape, ladder.vocab_size) / training_flops(shape, ladder.vocab_size)
    parameters, tokens = fitted.fit.law.best(product)
    interval = fitted.fit.laws.best_size(product)
    check_identified(fitted.fit)
    if interval.high > _MAX_SPAN * interval.low:
        raise UserError(
            f"the law does not identify the best size for this budget: N is from {interval.low:.3g} to "
            f"{interval.high:.3g} with 95 %, and a factor of {_MAX_SPAN} is the most; add sizes, seeds or lengths to "
            "the ladder, or use a smaller budget"
        )
    _check_range(fitted, parameters, tokens, flops)
    model = scaled_model(shape, parameters, ladder.vocab_size)
    tokens = flops / training_flops(model, ladder.vocab_size)
    settings, tokens = run_settings(fitted, config, model, tokens)
    if settings["trainer.num_train_steps"] < _MIN_STEPS:
        raise UserError(
            f"the best run has {counted(settings['trainer.num_train_steps'], 'step')} of "
            f"{settings['trainer.train_batch_size']:,} sequences, and {_MIN_STEPS} are the fewest; use a smaller "
            "trainer.train_batch_size, or a larger budget"
        )
    if settings["trainer.num_train_steps"] >= 2**31:
        raise UserError(
            f"the best run has {settings['trainer.num_train_steps']:,} steps of "
            f"{settings['trainer.train_batch_size']:,} sequences; use a larger trainer.train_batch_size, or growth in "
            "the ladder"
        )
    flat = fitted.fit.law.flat_range(product)
    return Best(
        parameters=parameters,
        interval=interval,
        range=flat,
        prediction=predict(fitted, model, tokens),
        settings=settings,
    )


def check_identified(fit: Fit) -> None:
    """Raise `UserError` if the law does not identify the exponents, with which the best size grows; an E at its bound
    makes them wrong."""
    if wrong := [name for name in fit.unidentified if name != "E" or name in fit.at_bounds]:
        raise UserError(
            f"these runs do not identify {', '.join(wrong)} of the law, so that it has no best size: `lmtrain "
            "scaling fit` shows the intervals; add sizes that differ more, lengths or seeds to the ladder"
        )


def _check_range(fitted: FittedLadder, parameters: float, tokens: float, flops: float) -> None:
    """Raise `UserError` if the best run for a budget is smaller than the runs of the ladder, or far beyond them."""
    points = [run.point for run in fitted.runs]
    ranges: dict[str, tuple[float, list[float]]] = {
        "N": (parameters, [point.parameters for point in points]),
        "D": (tokens, [point.tokens for point in points]),
        "FLOPs": (flops, [point.flops_per_token * point.tokens for point in points]),
    }
    for name, (value, found) in ranges.items():
        said = f"the best run for this budget, N {parameters:.3g} and D {tokens:.3g}, has"
        if value > FAR[name] * max(found):
            raise UserError(
                f"{said} {value / max(found):,.4g} times the largest {name} of the ladder, and {FAR[name]:,} times are "
                "the most: use a smaller budget, or a ladder with larger runs"
            )
        if value < min(found):
            raise UserError(
                f"{said} less than the smallest {name} of the ladder, {min(found):.3g}: use a larger budget, or a "
                "ladder with smaller runs"
            )


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
    return settings | ladder.transfer_of(config, False), steps * batch


def check_config(ladder: Ladder, path: str, config: RunConfig) -> None:
    """Raise `UserError` for a config whose loss is not on the ladder's scale."""
    check_start(path, config)
    for name, ours, theirs in (
        ("model.type", ladder.run.model.type, config.model.type),
        ("data.tokenizer", ladder.run.data.tokenizer, config.data.tokenizer),
    ):
        if ours != theirs:
            raise UserError(f"{path}: {name} is {theirs}, that of the ladder {ours}: the law says nothing about it")


def unknown_effects(fitted: FittedLadder, config: RunConfig, train_tokens: float | None) -> list[str]:
    """In what a config differs from a run of the ladder with its size and length, with effects that the law does not
    know. `train_tokens`: tokens of the training data; None if unknown."""
    ladder, tokens = fitted.ladder, tokens_of(config)
    shape = config.model.model_dump(mode="json", exclude_unset=True)
    settings, _ = run_settings(fitted, config, config.model, tokens)
    if not ladder.config.growth.batch_size:
        settings["trainer.train_batch_size"] = ladder.batch_size
    settings |= {f"model.{name}": shape[name] for name in sizes_of(config.model) if name in shape}
    settings |= {"trainer.seed": config.trainer.seed, "trainer.num_train_steps": config.trainer.num_train_steps}
    ours, theirs = (
        described(each) | {"optimizer.decay": each.optimizer.decay_length}
        for each in (ladder.load(settings, "prediction"), config)
    )
    if config.transfer is None and (base := ladder.base_sizes) is not None:
        ours = {name: value for name, value in ours.items() if not name.startswith("transfer.")}
        ours["transfer"] = {"base": base}
    found = [f"{name} {their} (ladder: {our})" for name, our, their in compared(ours, theirs)]
    return found + repetitions(tokens, train_tokens)


def repetitions(tokens: float, train_tokens: float | None) -> list[str]:
    """That data is read more than once, which the law does not know."""
    if train_tokens is None or tokens <= train_tokens:
        return []
    return [f"repeated data ({tokens / train_tokens:.3g} epochs)"]
