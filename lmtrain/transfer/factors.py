"""Factors of each parameter's initial values, learning rate, epsilon and gradient, relative to a smaller model.

With m the ratio of a matrix's inputs to those of the base, w that of the widths and l that of the depths, CompleteP
(Dey et al. 2025, table 1, with alpha = 1) multiplies the outputs of attention and MLP by 1 / l and the logits by 1 / w,
and scales rates and initial values of hidden matrices. A multiplier c on a matrix W' is folded into W = c W', so that a
model has no multipliers and is an ordinary one for every other program: initial values and rate times c, epsilon
divided by c, and gradients multiplied by c before they are clipped.

    parameter                      initial values   rate       multiplier c   epsilon, of W'
    embeddings, positions          1                1          1              1 / w
    q, k, v, gate, up, experts'    m^-1/2           1 / m      1              1 / (w l)
    out, down                      m^-1/2 / l       1 / (m l)  1 / l          1 / (w l)
    their biases                   0                1 / l      1 / l          1 / (w l)
    norms and biases of blocks     1                1          1              1 / (w l)
    untied head                    1 / w            1 / w      1 / w          1 / w
    final norm of a tied head      1 / w            1 / w      1 / w          1 / w
    final norm of an untied head   1                1          1              1 / w

Epsilon follows the gradient of W': that of the stream is 1 / w, as the logits are multiplied by 1 / w, and that of what
is added to it 1 / (w l), whatever the inputs of the matrix. The authors' code divides by w l outside of the blocks too;
their table names the blocks only, and no gradient outside of them depends on the depth.

Lion has the rates of Adam. Muon's updates of matrices have a size of their own, so that their rate has the multiplier
only, and with `use_kimi_scaling` the root of the ratio of the larger dimensions (Liu et al. 2025).

Weight decay multiplies the parameter by 1 - rate * weight_decay for any size: it has no factor.

Not in the publications, and derived: with norms after attention and MLP, their gains have the 1 / l; a norm that scales
by 1 + gain begins at c - 1; embeddings that the model multiplies by sqrt(D) have c = w^-1/2; where the width of heads
differs, queries have a factor that makes the scale of scores 1 / width; Backpack's logits have no norm before them, so
that 1 / w is a factor of the sense vectors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lmtrain.models.config import ModelConfig
from lmtrain.models.moe.load import BIAS
from lmtrain.models.params import abstract_params, flatten, parameter_axes, shapes_by_path, unflatten
from lmtrain.models.registry import build_model
from lmtrain.optim.config import MuonConfig, OptimizerConfig
from lmtrain.optim.muon import matrix_dims
from lmtrain.runtime.errors import UserError
from lmtrain.transfer.config import TransferConfig, base_of

Number = float | np.ndarray

_EMBED = ("embed", "expert_embed")
_STACKED = ("layers", "expert", "qkv", "senses")
_ANY_VOCABULARY = 128


@dataclass(frozen=True, kw_only=True)
class Factor:
    """Factors of a parameter: of its initial values, to which `offset` is added, its rate, its gradient before it is
    clipped, and Adam's epsilon for the gradient with that factor. Arrays are broadcast to the parameter's shape."""

    initial: Number = 1.0
    rate: Number = 1.0
    gradient: Number = 1.0
    epsilon: float = 1.0
    offset: float = 0.0

    def times(self, c: Number) -> "Factor":
        """With a further multiplier on the parameter."""
        return replace(self, initial=self.initial * c, rate=self.rate * c, gradient=self.gradient * c)


def factors_of(config: ModelConfig, sizes: Mapping[str, Any], optimizer: OptimizerConfig) -> dict[str, Factor]:
    """The factor of each parameter of a model, by its path, relative to a model with these sizes."""
    base = base_of(config, sizes)
    model = build_model(config, _ANY_VOCABULARY)
    axes = flatten(parameter_axes(model))
    shapes = shapes_by_path(abstract_params(model))
    base_shapes = shapes_by_path(abstract_params(build_model(base, _ANY_VOCABULARY)))
    rules = _Rules(config, base)
    factors = {path: rules.of(path, axes[path], shapes[path], base_shapes[path]) for path in shapes}
    if not isinstance(optimizer, MuonConfig):
        return factors
    for path, factor in factors.items():
        if dims := matrix_dims(axes[path]):
            largest, of_base = (
                max(math.prod(shape[dim] for dim in group) for group in dims)
                for shape in (shapes[path], base_shapes[path])
            )
            kimi = (of_base / largest) ** 0.5 if optimizer.use_kimi_scaling else 1.0
            factors[path] = replace(factor, rate=factor.gradient * kimi, epsilon=1.0)
    return factors


def factor_trees(
    transfer: TransferConfig | None, config: ModelConfig, optimizer: OptimizerConfig
) -> dict[str, Any] | None:
    """Trees like the parameters: `initial`, `rate`, `gradient`, `epsilon`, `offset`. None without a transfer."""
    if transfer is None:
        return None
    factors = factors_of(config, transfer.base, optimizer)
    return {
        field.name: unflatten({path: getattr(factor, field.name) for path, factor in factors.items()})
        for field in fields(Factor)
    }


class _Rules:
    def __init__(self, config: Any, base: Any):
        """`config` and `base`: model configs of the same family."""
        self.config, self.base = config, base
        self.width = config.hidden_dim / base.hidden_dim
        self.depth = config.num_layers / base.num_layers
        self.position = getattr(config, "norm_position", "pre")
        self.is_backpack = config.type == "backpack"
        self.is_tied = self.is_backpack or config.tie_word_embeddings
        self.scales_embeddings = getattr(config, "scale_embeddings", False)
        self.has_offset = getattr(config, "norm_offset", False)
        if getattr(config, "qk_norm", "none") == "weightless" and self._queries != 1:
            raise UserError(
                "transfer.base: with qk_norm weightless nothing can scale the attention scores of heads of another "
                "width; set num_heads (or head_dim) so that the heads are as wide as the model's"
            )

    def of(self, path: str, axes: tuple[str, ...], shape: tuple[int, ...], base: tuple[int, ...]) -> Factor:
        leaf = path.rpartition("/")[2]
        if leaf == BIAS:
            return Factor()
        if leaf == "embedding":
            return self._table(path)
        if path.startswith("norm_final/"):
            return self._final_norm(leaf)
        depth = self.depth if path.startswith("blocks/") else 1.0
        if leaf == "kernel":
            return self._matrix(path, axes, shape, base, depth)
        if leaf == "bias" and "/norm_" not in path:
            return self._bias(path, axes, depth)
        return self._norm(path, leaf, depth)

    def _table(self, path: str) -> Factor:
        spread = self.base.initial_range(self.base.hidden_dim) / self.config.initial_range(self.config.hidden_dim)
        table = Factor(initial=spread, epsilon=1 / self.width)
        if path.startswith("unembed/"):
            return table.times(1 / self.width)
        return table.times(self.width**-0.5) if self.scales_embeddings and path.startswith("tokens/") else table

    def _final_norm(self, leaf: str) -> Factor:
        c = self.width**-0.5 if self.scales_embeddings else 1 / self.width
        return self._gain(leaf, c if self.is_tied and not self.is_backpack else 1.0, 1 / self.width)

    def _gain(self, leaf: str, c: float, epsilon: float) -> Factor:
        """A norm's scale or bias with the multiplier `c`."""
        factor = Factor(epsilon=epsilon).times(c)
        if leaf == "scale" and self.has_offset:
            return replace(factor, offset=c - 1)
        return factor

    def _norm(self, path: str, leaf: str, depth: float) -> Factor:
        name = path.split("/")[-2]
        after = {"pre": (), "post": ("norm_attn", "norm_mlp"), "both": ("norm_mixed", "norm_added")}[self.position]
        c = 1 / depth if name in after else self._queries if name == "norm_q" else 1.0
        return self._gain(leaf, c, 1 / (self.width * depth))

    def _bias(self, path: str, axes: tuple[str, ...], depth: float) -> Factor:
        factor = Factor(epsilon=1 / (self.width * depth))
        if axes[-1] in _EMBED:
            return factor.times(self._added(depth) * self._of_senses(path))
        return factor.times(self._of_queries(path, axes))

    def _matrix(
        self, path: str, axes: tuple[str, ...], shape: tuple[int, ...], base: tuple[int, ...], depth: float
    ) -> Factor:
        inputs, base_inputs = (_inputs(axes, sizes) for sizes in (shape, base))
        m, adds = inputs / base_inputs, axes[-1] in _EMBED and path.startswith("blocks/")
        spread = self.base.initial_range(base_inputs, adds) / self.config.initial_range(inputs, adds)
        factor = Factor(initial=spread * m**-0.5, rate=1 / m, gradient=1.0, epsilon=1 / (self.width * depth))
        if axes[-1] in _EMBED:
            return factor.times(self._added(depth) * self._of_senses(path))
        return factor.times(self._of_queries(path, axes))

    def _added(self, depth: float) -> float:
        """The multiplier of what is added to the residual stream; a norm after it would undo it."""
        return 1 / depth if self.position == "pre" else 1.0

    def _of_senses(self, path: str) -> float:
        return 1 / self.width if path.startswith("senses/to_senses/down/") else 1.0

    def _of_queries(self, path: str, axes: tuple[str, ...]) -> Number:
        """The multiplier of queries among the outputs of a layer."""
        name = path.split("/")[-2]
        if name == "weigh":  # scores are divided by the root of the width
            c = (self.base.sense_width / self.config.sense_width) ** 0.5
        elif name in ("q", "qkv") and getattr(self.config, "qk_norm", "none") == "none":
            c = self._queries
        else:
            return 1.0
        if "qkv" not in axes or c == 1:
            return c
        number = axes.index("qkv")
        parts = np.ones(2 if name == "weigh" else 3)
        parts[0] = c
        return parts.reshape([-1] + [1] * (len(axes) - number - 1))

    @property
    def _queries(self) -> float:
        """The multiplier of queries that makes the scale of scores proportional to 1 / width of a head."""
        ours, theirs = (config.head_width * config.score_scale for config in (self.config, self.base))
        return theirs / ours


def _inputs(axes: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """The number of inputs of a matrix: the embedding, or all dimensions before it and its stacked outputs."""
    own = [(name, size) for name, size in zip(axes, shape, strict=True) if name not in _STACKED]
    if own[0][0] in _EMBED:
        return own[0][1]
    return math.prod(size for name, size in own if name not in _EMBED)


def describe(factors: Mapping[str, Factor]) -> list[str]:
    """A line for each parameter with its factors, of epsilon for the gradient without its factor."""
    rows = [("parameter", "initial values", "rate", "epsilon")]
    for path, factor in factors.items():
        begin = f" {factor.offset:+.4g}" if factor.offset else ""
        values = _written(factor.initial) + begin, _written(factor.rate), _written(factor.epsilon / factor.gradient)
        rows.append((path, *values))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _written(factor: Number) -> str:
    """A number, or those of queries, keys and values."""
    return ", ".join(f"{value:.4g}" for value in np.ravel(factor))
