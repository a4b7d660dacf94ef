"""Log-likelihoods of many token sequences, in batches of similar lengths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lmtrain.evaluation.benchmarks.score_step import build_score_step
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.read_ahead import read_ahead
from lmtrain.sharding.mesh import platform_of
from lmtrain.sharding.placement import local_rows, place_batch

# The shortest sequences of a batch: kernels of accelerators need multiples of 128.
_SHORTEST = {"cpu": 32, "gpu": 128, "tpu": 128}
# Targets of a sequence that are scored in the small form of the step; more take the large form, with all positions.
_FEW_TARGETS = 32


class Question(NamedTuple):
    """Tokens that the model reads, and targets: the last of them follows the last token, and so on backwards."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


class Answer(NamedTuple):
    """The sum of the targets' log-probabilities, and whether each target is the most likely token."""

    log_likelihood: float
    is_greedy: bool


@dataclass
class _Row:
    """One sequence, and the questions about it: those with the same tokens share it."""

    tokens: tuple[int, ...]
    questions: list[int]
    places: list[int]
    targets: list[int]


class Scorer:
    """Answers questions with the model of `context`. Lengths are rounded up to few sizes, so few programs compile.

    Every process asks the same questions and gets all answers.
    """

    def __init__(self, context: Context):
        self._context = context
        self._step = build_score_step(context.model, context.layout, context.compute_dtype, context.xla_options)
        kind = platform_of(context.layout.mesh.devices.flat[0])
        self._lengths = lengths(context.seq_len, _SHORTEST.get(kind, 128))

    def score(
        self, params: Any, questions: Sequence[Question], advance: Callable[[int], None] = lambda answered: None
    ) -> list[Answer]:
        """The answers in the order of the questions; `advance` is called with the number of those of each batch."""
        answers = [Answer(0.0, True)] * len(questions)
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
                    found = slice(start, end)
                    answers[question] = Answer(float(log_prob[number, found].sum()), bool(is_best[number, found].all()))
                    start = end
        return answers

    def _batches(self, questions: Sequence[Question]) -> Iterator[tuple[list[_Row], int, int]]:
        """Rows with the length of their batch and the number of rows, the longest first."""
        rows = _rows(questions)
        for few in (False, True):
            left = sorted(
                (row for row in rows if (len(row.targets) <= _FEW_TARGETS) == few), key=lambda row: -len(row.tokens)
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

    def _place(self, rows: list[_Row], length: int, size: int) -> Any:
        slots = max(len(row.targets) for row in rows)
        slots = _FEW_TARGETS if slots <= _FEW_TARGETS else -(-slots // length) * length
        batch = {
            "tokens": np.zeros((size, length), np.int32),
            "places": np.zeros((size, slots), np.int32),
            "targets": np.zeros((size, slots), np.int32),
        }
        for number, row in enumerate(rows):
            batch["tokens"][number, : len(row.tokens)] = row.tokens
            batch["places"][number, : len(row.places)] = row.places
            batch["targets"][number, : len(row.targets)] = row.targets
        sharding = self._context.layout.batch
        mine = local_rows(sharding, size)
        return place_batch({name: array[mine] for name, array in batch.items()}, sharding, mine, size)


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


def _rows(questions: Sequence[Question]) -> list[_Row]:
    """One row for each different sequence of tokens, with as many questions as fit into few targets."""
    rows: list[_Row] = []
    last: dict[tuple[int, ...], _Row] = {}
    for number, (tokens, targets) in enumerate(questions):
        row = last.get(tokens)
        if row is None or len(row.targets) + len(targets) > _FEW_TARGETS:
            row = last[tokens] = _Row(tokens, [], [], [])
            rows.append(row)
        row.questions.append(number)
        row.places += range(len(tokens) - len(targets), len(tokens))
        row.targets += targets
    return rows
