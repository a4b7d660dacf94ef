"""Validation loss: the mean over all target tokens of a split."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from clu.metrics import Average

_LARGEST_EXPONENT = 700  # beyond it a float has no exponential


@dataclass(frozen=True)
class Means:
    """Of a set: its loss in nats, per target and per byte of text; the bytes are 0 if they are not known.

    Totals are kept on the host: the loss in float64, counts as whole numbers.
    """

    per_token: Average
    per_byte: Average

    @classmethod
    def of(cls, loss: float, tokens: int, size: int) -> "Means":
        total = np.float64(loss)
        return cls(Average(total, np.int64(tokens)), Average(total, np.int64(size)))

    def merge(self, other: "Means") -> "Means":
        return Means(self.per_token.merge(other.per_token), self.per_byte.merge(other.per_byte))


def evaluate(
    eval_step: Callable[[Any, Any], Any],
    params: Any,
    sets: Mapping[str, Callable[[], Iterable[Any]]],
    prefix: str = "eval",
) -> dict[str, float]:
    """`eval/loss`, in nats per token, and the number of tokens it is the mean of, over all sets together.

    `eval/bpb` are bits per byte of text, where the tokenizer tells its tokens' bytes. Of several sets also
    `eval/<name>/loss` and `/bpb` of each, and `eval/macro_loss` and `/macro_bpb`, the means of these.
    """
    means = {name: _means(eval_step, params, batches()) for name, batches in sets.items()}
    whole = functools.reduce(Means.merge, means.values(), Means.of(0.0, 0, 0))
    metrics = {**_metrics(prefix, whole), f"{prefix}/tokens": float(whole.per_token.count)}
    if len(means) > 1:
        for name, part in means.items():
            metrics |= _metrics(f"{prefix}/{name}", part)
        for kind in ("loss", "bpb"):
            values = [metrics.get(f"{prefix}/{name}/{kind}") for name in means]
            known = [value for value in values if value is not None]
            if known:
                metrics[f"{prefix}/macro_{kind}"] = sum(known) / len(known)
    return metrics


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """One line of the result of `evaluate`: of all sets together, then the loss of each."""
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
    """Whether a metric is the loss of one of several sets; those of averaged weights are not told."""
    return (
        name.startswith("eval/") and not name.startswith("eval/ema/") and name.endswith("/loss") and name.count("/") > 1
    )


def _metrics(prefix: str, means: Means) -> dict[str, float]:
    metrics = {f"{prefix}/loss": float(means.per_token.compute()) if means.per_token.count else 0.0}
    if means.per_byte.count:
        metrics[f"{prefix}/bpb"] = float(means.per_byte.compute()) / math.log(2)
    return metrics


def _means(eval_step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any]) -> Means:
    """Batches are dispatched without waiting for their results, which are added up when all are on their way."""
    results = [eval_step(params, batch) for batch in batches]
    parts = (Means.of(float(loss), int(tokens), int(size)) for loss, tokens, size in results)
    return functools.reduce(Means.merge, parts, Means.of(0.0, 0, 0))
