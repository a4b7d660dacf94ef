"""Validation loss: the mean over all target tokens of a split."""

from collections.abc import Callable, Iterable
from typing import Any


def evaluate(eval_step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any]) -> dict[str, float]:
    """`eval/loss`, in nats per token, and the number of tokens it is the mean of.

    Batches are dispatched without waiting for their results, which are added up on the host in float64.
    """
    results = [eval_step(params, batch) for batch in batches]
    loss = sum(float(total) for total, _ in results)
    count = sum(int(number) for _, number in results)
    return {"eval/loss": loss / max(count, 1), "eval/tokens": float(count)}
