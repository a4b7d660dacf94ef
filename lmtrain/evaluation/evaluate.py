"""Validation loss: the mean over all target tokens of a split."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST_EXPONENT = 700  # beyond it a float has no exponential


@dataclass(frozen=True)
class Sums:
    """Of a set: summed loss in nats, its targets, and the bytes of their text (0 if that is not known)."""

    loss: float
    tokens: int
    bytes: int

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.loss + other.loss, self.tokens + other.tokens, self.bytes + other.bytes)


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
    sums = {name: _sum(eval_step, params, batches()) for name, batches in sets.items()}
    whole = sum(sums.values(), Sums(0.0, 0, 0))
    metrics = {**_means(prefix, whole), f"{prefix}/tokens": float(whole.tokens)}
    if len(sums) > 1:
        for name, part in sums.items():
            metrics |= _means(f"{prefix}/{name}", part)
        for kind in ("loss", "bpb"):
            values = [metrics.get(f"{prefix}/{name}/{kind}") for name in sums]
            known = [value for value in values if value is not None]
            if known:
                metrics[f"{prefix}/macro_{kind}"] = sum(known) / len(known)
    return metrics


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """One line of the result of `evaluate`."""
    loss = metrics["eval/loss"]
    perplexity = math.inf if loss >= _LARGEST_EXPONENT else math.exp(loss)
    parts = [f"perplexity {perplexity:.1f}"]
    if "eval/bpb" in metrics:
        parts.append(f"{metrics['eval/bpb']:.3f} bits per byte")
    if "eval/ema/loss" in metrics:
        parts.append(f"average {metrics['eval/ema/loss']:.4f}")
    return f"eval loss {loss:.4f} ({', '.join(parts)})"


def _means(prefix: str, sums: Sums) -> dict[str, float]:
    means = {f"{prefix}/loss": sums.loss / max(sums.tokens, 1)}
    if sums.bytes:
        means[f"{prefix}/bpb"] = sums.loss / math.log(2) / sums.bytes
    return means


def _sum(eval_step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any]) -> Sums:
    """Batches are dispatched without waiting for their results, which are added up on the host in float64."""
    results = [eval_step(params, batch) for batch in batches]
    return Sums(
        sum(float(loss) for loss, _, _ in results),
        sum(int(tokens) for _, tokens, _ in results),
        sum(int(size) for _, _, size in results),
    )
