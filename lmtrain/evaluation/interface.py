"""The interface of evaluators, and the context they get: training and `lmtrain eval` use only this."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmtrain.evaluation.validation_sets import ValidationSet
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.interface import LanguageModel
from lmtrain.objectives.interface import Objective
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.sharding.mesh import Layout


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Context:
    """What an evaluation may use. Its parameters are placed on `layout`; it computes in `compute_dtype`.

    `seq_len` is the model's context in tokens, `folder` the run's log folder, `objective` that of the run, None outside
    of training; with `enforce_bos` documents start with the BOS token. `batch_size` is the number of sequences of
    `seq_len` tokens in a batch, on all devices. Call `check_stop()` between batches, equally often in all processes; it
    raises `StoppedError` if the run has to stop. `progress(done, total, what)` may be called equally often.
    """

    model: LanguageModel
    layout: Layout
    compute_dtype: str
    tokenizer: Tokenizer
    sets: Mapping[str, ValidationSet]
    seq_len: int
    batch_size: int = 1
    processes: Processes = ALONE
    folder: str = ""
    objective: Objective | None = None
    enforce_bos: bool = False
    xla_options: Mapping[str, Any] = field(default_factory=dict)
    check_stop: Callable[[], None] = _nothing
    progress: Callable[[int, int, str], None] = _nothing


class Evaluator(Protocol):
    """One way to measure a model. Every process of a run calls it, with the same parameters.

    `name` is part of the names of its metrics: `eval/<name>/...`; `every` is its interval in steps, None for the last
    step only. Errors of an `optional` evaluator are logged, and training continues.
    """

    name: str
    every: int | None
    optional: bool

    def prepare(self, context: Context) -> bool:
        """Called once, before the first step. False if there is nothing to evaluate; it is then never called again.

        Raises `UserError` for settings that do not fit the run.
        """

    def evaluate(self, params: Any, step: int) -> Mapping[str, float | str]:
        """Metrics of `params` after `step` updates; names are without the prefix `eval/<name>/`.

        A string is a text to log under its prompt, without a prefix; that of averaged parameters takes precedence.
        """

    def describe(self, metrics: Mapping[str, Any]) -> str:
        """One line for the log. `metrics` have full names and may include those of averaged parameters; and texts."""
