"""Validation loss: the mean over all target tokens of a split."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any


def evaluate(
    eval_step: Callable[[Any, Any], Any], params: Any, sets: Mapping[str, Callable[[], Iterable[Any]]]
) -> dict[str, float]:
    """`eval/loss`, in nats per token, and the number of tokens it is the mean of, over all sets together.

    Of several sets also `eval/<name>/loss` of each, and `eval/macro_loss`, the mean of these.
    """
    sums = {name: _sum(eval_step, params, batches()) for name, batches in sets.items()}
    loss, count = (sum(part) for part in zip(*sums.values(), strict=True)) if sums else (0.0, 0)
    metrics = {"eval/loss": loss / max(count, 1), "eval/tokens": float(count)}
    if len(sums) > 1:
        losses = {name: total / max(number, 1) for name, (total, number) in sums.items()}
        metrics |= {f"eval/{name}/loss": value for name, value in losses.items()}
        metrics["eval/macro_loss"] = sum(losses.values()) / len(losses)
    return metrics


def _sum(eval_step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any]) -> tuple[float, int]:
    """Summed loss and number of targets of one set.

    Batches are dispatched without waiting for their results, which are added up on the host in float64.
    """
    results = [eval_step(params, batch) for batch in batches]
    return sum(float(total) for total, _ in results), sum(int(number) for _, number in results)
