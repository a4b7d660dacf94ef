"""Log-likelihoods of many token sequences, in batches of similar lengths.

For the prompt "2 + 2 =" and the choices "4", "5" and "2 2", the questions are

    Question(tokens=("2", "+", "2", "="), targets=("4",))
    Question(tokens=("2", "+", "2", "="), targets=("5",))              the same tokens: one row of a batch for both
    Question(tokens=("2", "+", "2", "=", "2"), targets=("2", "2"))     the targets of the last two positions
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.evaluation.eval_step import read_ahead
from lmtrain.evaluation.interface import Context
from lmtrain.models.interface import MAIN, LanguageModel, outputs_of
from lmtrain.models.params import cast_to_compute
from lmtrain.objectives.row_losses import TargetScores, score_targets
from lmtrain.sharding.mesh import Layout, MeshFunction, platform_of
from lmtrain.sharding.placement import LocalPart, constrain

# The shortest sequences of a batch: kernels of accelerators need multiples of 128.
_MIN_LENGTH = {"cpu": 32, "gpu": 128, "tpu": 128}
# Targets of a sequence that are scored in the small form of the step; more take the large form, with all positions.
_SMALL = 32


class Question(NamedTuple):
    """Tokens that the model reads, and targets: the last of them follows the last token, and so on backwards."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


class Likelihood(NamedTuple):
    """The sum of the targets' log-probabilities, and whether each target is the most likely token."""

    log_likelihood: float
    is_greedy: bool


@dataclass(kw_only=True)
class _ScoredRow:
    """One sequence, and the questions about it: those with the same tokens share it."""

    tokens: tuple[int, ...]
    questions: list[int]
    positions: list[int]
    targets: list[int]


class Scorer:
    """Answers questions with the model of `context`. Lengths are rounded up to few sizes, so few programs compile.

    Every process asks the same questions and gets all answers.
    """

    def __init__(self, context: Context):
        self._context = context
        self._step = build_score_step(context.model, context.layout, context.compute_dtype, context.xla_options)
        kind = platform_of(context.layout.mesh.devices.flat[0])
        self._lengths = lengths(context.seq_len, _MIN_LENGTH.get(kind, 128))

    def score(
        self, params: Any, questions: Sequence[Question], advance: Callable[[int], None] = lambda answered: None
    ) -> list[Likelihood]:
        """The answers in the order of the questions; `advance` is called with the number of those of each batch."""
        answers = [Likelihood(0.0, True)] * len(questions)
        batches = list(self._batches(questions))
        counts = iter([sum(len(row.questions) for row in rows) for rows, _, _ in batches])

        def between() -> None:
            self._context.check_stop()
            advance(next(counts))

        placed = (self._place(*batch) for batch in batches)
        for (rows, _, _), scores in zip(batches, read_ahead(self._step, params, placed, between), strict=True):
            log_prob, is_best = np.asarray(scores.log_prob, np.float64), np.asarray(scores.is_best)
            for number, row in enumerate(rows):
                start = 0
                for question in row.questions:
                    end = start + len(questions[question].targets)
                    own = slice(start, end)
                    answers[question] = Likelihood(float(log_prob[number, own].sum()), bool(is_best[number, own].all()))
                    start = end
        return answers

    def _batches(self, questions: Sequence[Question]) -> Iterator[tuple[list[_ScoredRow], int, int]]:
        """Rows with the length of their batch and the number of rows, the longest first."""
        rows = _rows(questions)
        for is_small in (False, True):
            left = sorted(
                (row for row in rows if (len(row.targets) <= _SMALL) == is_small), key=lambda row: -len(row.tokens)
            )
            while left:
                length = next(size for size in self._lengths if size >= len(left[0].tokens))
                size = self._rows_at_once(length, len(left))
                yield left[:size], length, size
                left = left[size:]

    def _rows_at_once(self, length: int, wanted: int) -> int:
        """As many tokens as a batch of evaluation has, but not many more rows than are wanted."""
        most = self._context.batch_size * max(1, self._context.seq_len // length)
        return rows_for(wanted, most, self._context.layout.num_batch_shards)

    def _place(self, rows: list[_ScoredRow], length: int, size: int) -> Any:
        width = max(len(row.targets) for row in rows)
        width = _SMALL if width <= _SMALL else -(-width // length) * length
        batch = {
            "tokens": np.zeros((size, length), np.int32),
            "positions": np.zeros((size, width), np.int32),
            "targets": np.zeros((size, width), np.int32),
        }
        for number, row in enumerate(rows):
            batch["tokens"][number, : len(row.tokens)] = row.tokens
            batch["positions"][number, : len(row.positions)] = row.positions
            batch["targets"][number, : len(row.targets)] = row.targets
        # lengths of any size need not divide over devices
        parts = {name: LocalPart.of(self._context.layout.rows, *array.shape) for name, array in batch.items()}
        return {name: part.place(part.cut({name: batch[name]}))[name] for name, part in parts.items()}


def rows_for(wanted: int, most: int, shards: int) -> int:
    """`wanted` rounded up to one of few numbers of rows, which divide over `shards` devices; at most `most`."""
    sizes = (size * shards for power in range(64) for size in sorted({2**power, 3 * 2**power // 2}))
    return min(next(size for size in sizes if size >= wanted), most)


def lengths(longest: int, shortest: int) -> list[int]:
    """The sizes that sequences are rounded up to, ascending: `shortest` times 1, 2, 3, 4, 6, 8, 12, ..., and `longest`.

    Less than half of a sequence is padding, or it has the shortest size.
    """
    sizes = {longest}
    for power in range(longest.bit_length()):
        sizes |= {size for size in (shortest * 2**power, shortest * 3 * 2**power) if size < longest}
    return sorted(sizes)


def _rows(questions: Sequence[Question]) -> list[_ScoredRow]:
    """One row for each different sequence of tokens, with as many questions as fit into few targets."""
    rows: list[_ScoredRow] = []
    last: dict[tuple[int, ...], _ScoredRow] = {}
    for number, (tokens, targets) in enumerate(questions):
        row = last.get(tokens)
        if row is None or len(row.targets) + len(targets) > _SMALL:
            row = last[tokens] = _ScoredRow(tokens=tokens, questions=[], positions=[], targets=[])
            rows.append(row)
        row.questions.append(number)
        row.positions += range(len(tokens) - len(targets), len(tokens))
        row.targets += targets
    return rows


def build_score_step(
    model: LanguageModel, layout: Layout, compute_dtype: str, options: Mapping[str, Any] | None = None
) -> MeshFunction:
    """The jitted (params, batch) -> `TargetScores` [B, T], without dropout.

    The batch has `tokens` [B, S], `positions` [B, T], and `targets` [B, T], all int32: target t of a sequence is a
    candidate for the token after position `positions[t]`. Only the logits of these positions are computed.
    """

    def score(params: Any, batch: Mapping[str, jax.Array]) -> TargetScores:
        variables = {"params": cast_to_compute(params, compute_dtype)}
        only_tokens = {"tokens": batch["tokens"]}
        head = model.apply(variables, only_tokens, True, method=outputs_of)[MAIN]
        chosen = jnp.take_along_axis(head.hidden, batch["positions"][:, :, None], axis=1)
        chosen = constrain(chosen, "act_batch", "act_seq", None)
        return score_targets(head.replace(hidden=chosen), batch["targets"])

    return MeshFunction(layout, jax.jit(score, out_shardings=layout.replicated, compiler_options=dict(options or {})))
