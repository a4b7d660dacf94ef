"""Validation loss: the mean over all target tokens of a split."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from clu.metrics import Average

from lmtrain.evaluation.eval_step import build_eval_step
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.read_ahead import read_ahead
from lmtrain.hf.token_bytes import token_bytes

_LARGEST_EXPONENT = 700  # math.exp overflows beyond it


@dataclass(frozen=True)
class Means:
    """Mean loss of a set in nats, per target and per byte of text; the byte count is 0 if unknown.

    Totals are accumulated on the host: the loss in float64, counts as integers.
    """

    per_token: Average
    per_byte: Average

    @classmethod
    def of(cls, loss: float, tokens: int, size: int) -> "Means":
        total = np.float64(loss)
        return cls(Average(total, np.int64(tokens)), Average(total, np.int64(size)))

    def merge(self, other: "Means") -> "Means":
        return Means(self.per_token.merge(other.per_token), self.per_byte.merge(other.per_byte))


class Perplexity:
    """The loss on all validation sets: the evaluator of every run that has validation sets."""

    name = ""
    optional = False

    def __init__(self, every: int | None = None):
        self.every = every

    def prepare(self, context: Context) -> bool:
        self._context = context
        lengths = token_bytes(context.tokenizer) if context.sets else None
        self._step = build_eval_step(context.model, context.layout, context.compute_dtype, lengths, context.xla_options)
        return bool(context.sets)

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """`loss` in nats per token, and the number of `tokens` that it averages, over all sets together.

        `bpb` is bits per byte of text, if the tokenizer's token lengths are known. With several sets, also
        `<name>/loss` and `<name>/bpb` of each, and their means over the sets, `macro_loss` and `macro_bpb`.
        """
        context, done = self._context, itertools.count(1)
        total = sum(map(len, context.sets.values()))

        def between() -> None:
            context.check_stop()
            context.progress(next(done), total, "batches")

        return measure(self._step, params, context.sets, between)

    def describe(self, metrics: Mapping[str, float]) -> str:
        return describe_perplexity(metrics)


def measure(
    eval_step: Callable[[Any, Any], Any],
    params: Any,
    sets: Mapping[str, Iterable[Any]],
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The metrics of `Perplexity`; `between` is called after each batch."""
    means = {name: _means(eval_step, params, batches, between) for name, batches in sets.items()}
    whole = functools.reduce(Means.merge, means.values(), Means.of(0.0, 0, 0))
    metrics = {**_metrics("", whole), "tokens": float(whole.per_token.count)}
    if len(means) > 1:
        for name, part in means.items():
            metrics |= _metrics(f"{name}/", part)
        for kind in ("loss", "bpb"):
            values = [metrics.get(f"{name}/{kind}") for name in means]
            known = [value for value in values if value is not None]
            if known:
                metrics[f"macro_{kind}"] = sum(known) / len(known)
    return metrics


def describe_perplexity(metrics: Mapping[str, float]) -> str:
    """One line from metrics with full names: all sets together, then the loss of each."""
    loss = metrics["eval/loss"]
    perplexity = math.inf if loss >= _LARGEST_EXPONENT else math.exp(loss)
    parts = [f"perplexity {perplexity:.1f}"]
    if "eval/bpb" in metrics:
        parts.append(f"{metrics['eval/bpb']:.3f} bits per byte")
    if "eval/ema/loss" in metrics:
        parts.append(f"average {metrics['eval/ema/loss']:.4f}")
    each = {name.split("/", 1)[1].removesuffix("/loss"): value for name, value in metrics.items() if _of_a_set(name)}
    of_each = f"; {', '.join(f'{name} {value:.4f}' for name, value in each.items())}" if each else ""
    return f"eval loss {loss:.4f} ({', '.join(parts)}){of_each}"


def _of_a_set(name: str) -> bool:
    """Whether a metric is the loss of one of several sets; losses of averaged parameters are omitted."""
    return (
        name.startswith("eval/") and not name.startswith("eval/ema/") and name.endswith("/loss") and name.count("/") > 1
    )


def _metrics(prefix: str, means: Means) -> dict[str, float]:
    metrics = {f"{prefix}loss": float(means.per_token.compute()) if means.per_token.count else 0.0}
    if means.per_byte.count:
        metrics[f"{prefix}bpb"] = float(means.per_byte.compute()) / math.log(2)
    return metrics


def _means(
    eval_step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any], between: Callable[[], None]
) -> Means:
    means = Means.of(0.0, 0, 0)
    for loss, tokens, size in read_ahead(eval_step, params, batches, between):
        means = means.merge(Means.of(float(loss), int(tokens), int(size)))
    return means
