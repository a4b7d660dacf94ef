"""The shape rule of a family: a model of another size with the proportions of a given one."""

import math
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from lmtrain.config.errors import UserError
from lmtrain.models.config import ModelConfig
from lmtrain.scaling.ladder import multiplying_parameters

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
