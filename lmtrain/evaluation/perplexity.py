"""Validation loss: the mean over all target tokens of a split."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.evaluation.eval_step import build_eval_step, read_ahead
from lmtrain.evaluation.interface import Context
from lmtrain.hf.tokenizer import text_sizes

_LARGEST_EXPONENT = 700  # math.exp overflows beyond it
_OF_A_SET = re.compile(r"eval/(?!ema/)(.+)/loss")


class _Sums(NamedTuple):
    """The loss of a set in nats, its targets, and the bytes of their text, 0 if unknown; accumulated on the host."""

    loss: float = 0.0
    tokens: int = 0
    size: int = 0

    def plus(self, loss: Any, tokens: Any, size: Any) -> "_Sums":
        return _Sums(self.loss + float(loss), self.tokens + int(tokens), self.size + int(size))


class Perplexity:
    """The loss on all validation sets: the evaluator of every run that has validation sets."""

    name = ""
    optional = False

    def __init__(self, every: int | None = None):
        self.every = every

    def prepare(self, context: Context) -> bool:
        self._context = context
        sizes = text_sizes(context.tokenizer) if context.sets else None
        self._step = build_eval_step(context.model, context.layout, context.compute_dtype, sizes, context.xla_options)
        return bool(context.sets)

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """`loss` in nats per token, and the number of `tokens` that it averages, over all sets together.

        `bpb` is bits per byte of text, if the tokenizer's token lengths are known. With several sets, also
        `<name>/loss` and `<name>/bpb` of each, and their means over the sets, `macro_loss` and `macro_bpb`.
        """
        return measure(self._step, params, self._context.sets, self._context.between_batches("batches"))

    def describe(self, metrics: Mapping[str, float]) -> str:
        """All sets together, then the loss of each; losses of averaged parameters are only shown together."""
        loss = metrics["eval/loss"]
        perplexity = math.inf if loss >= _LARGEST_EXPONENT else math.exp(loss)
        parts = [f"perplexity {perplexity:.1f}"]
        if "eval/bpb" in metrics:
            parts.append(f"{metrics['eval/bpb']:.3f} bits per byte")
        if "eval/ema/loss" in metrics:
            parts.append(f"average {metrics['eval/ema/loss']:.4f}")
        each = [f"{found[1]} {metrics[name]:.4f}" for name in metrics if (found := _OF_A_SET.fullmatch(name))]
        return f"eval loss {loss:.4f} ({', '.join(parts)}){'; ' if each else ''}{', '.join(each)}"


def build(config: EvaluationConfig) -> Perplexity | None:
    """The evaluator of a run that evaluates."""
    return None if config.steps_per_eval is None else Perplexity(config.steps_per_eval)


def measure(
    eval_step: Callable[[Any, Any], Any],
    params: Any,
    sets: Mapping[str, Iterable[Any]],
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The metrics of `Perplexity`; `between` is called after each batch."""
    overall, of_sets = _Sums(), dict.fromkeys(sets, _Sums())
    for name, batches in sets.items():
        for result in read_ahead(eval_step, params, batches, between):
            of_sets[name] = of_sets[name].plus(*result)
        overall = overall.plus(*of_sets[name])
    metrics = {**_metrics("", overall), "tokens": float(overall.tokens)}
    if len(of_sets) > 1:
        for name, sums in of_sets.items():
            metrics |= _metrics(f"{name}/", sums)
        for kind in ("loss", "bpb"):
            values = [metrics.get(f"{name}/{kind}") for name in of_sets]
            known = [value for value in values if value is not None]
            if known:
                metrics[f"macro_{kind}"] = sum(known) / len(known)
    return metrics


def _metrics(prefix: str, sums: _Sums) -> dict[str, float]:
    metrics = {f"{prefix}loss": sums.loss / sums.tokens if sums.tokens else 0.0}
    if sums.size:
        metrics[f"{prefix}bpb"] = sums.loss / sums.size / math.log(2)
    return metrics
