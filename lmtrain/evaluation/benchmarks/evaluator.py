"""Benchmarks as an evaluation of a run, `eval_harness`."""

import contextlib
import json
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig, check_benchmarks
from lmtrain.evaluation.interface import Context
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import write_atomically

_NAME = "lm_eval"
# lm-eval's own seeds of Python and numpy, which some tasks use.
_SEEDS = (0, 1234)


class Benchmarks:
    """The tasks of lm-eval, with the model on its devices.

    Metrics are `<task>/<metric>`, and `<task>/<metric>/<filter>` for results of a filter of the task.
    """

    name = _NAME
    optional = True

    def __init__(self, config: EvalHarnessConfig, every: int | None):
        self.every = every
        self._config = config

    def prepare(self, context: Context) -> bool:
        """Load the tasks and their data. Raises `UserError` if a task or lm-eval is missing."""
        check_benchmarks(self._config)
        from lmtrain.evaluation.benchmarks.language_model import HarnessModel, generation_limits
        from lmtrain.evaluation.benchmarks.tasks import load_tasks

        tokenizer = _library_tokenizer(context.tokenizer)
        if self._config.apply_chat_template and not tokenizer.chat_template:
            raise UserError(
                f"eval_harness.apply_chat_template: the tokenizer {context.tokenizer.path} has no chat template"
            )
        length = self._config.max_eval_length or context.seq_len
        if length > context.seq_len:
            raise UserError(
                f"eval_harness.max_eval_length: {length} is more than the model's seq_len {context.seq_len}"
            )
        self._context = context
        self._tasks, self._names = load_tasks(self._config)
        for name, task in self._tasks["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                generation_limits(name, task.config.generation_kwargs or {}, length)
        self._model = HarnessModel(context, tokenizer, length)
        return True

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        from lm_eval.evaluator import evaluate

        from lmtrain.evaluation.benchmarks.tasks import quiet

        config = self._config
        self._model.params = params
        with quiet(), _seeded():
            results = evaluate(
                self._model,
                self._tasks,
                limit=config.max_examples,
                bootstrap_iters=config.bootstrap_iters,
                log_samples=config.log_samples,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=config.fewshot_as_multiturn,
                confirm_run_unsafe_code=config.confirm_run_unsafe_code,
            )
        self._model.params = None
        if config.log_samples and self._context.processes.is_first:
            self._write_samples(results["samples"], step)
        return dict(metrics_of(results, self._names))

    def describe(self, metrics: Mapping[str, Any]) -> str:
        prefix = f"eval/{_NAME}/"
        shown = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        return f"lm-eval: {', '.join(f'{name} {value:.4f}' for name, value in sorted(shown.items()))}"

    def _write_samples(self, samples: Mapping[str, Any], step: int) -> None:
        from lm_eval.utils import handle_non_serializable

        folder = os.path.join(self._context.folder, _NAME, f"step-{step}")
        os.makedirs(folder, exist_ok=True)
        for task, examples in samples.items():
            lines = (json.dumps(example, default=handle_non_serializable, ensure_ascii=False) for example in examples)
            path = os.path.join(folder, f"samples_{task}.jsonl")
            write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
        log.info(f"lm-eval: requests and results are in {folder}")


def metrics_of(results: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """The numbers in lm-eval's results of tasks and groups. `names` has those of tasks that are renamed."""
    for section in ("results", "groups"):
        for task, values in results.get(section, {}).items():
            for key, value in values.items():
                metric, _, kind = key.partition(",")
                if kind and isinstance(value, (int, float, np.number)):
                    yield "/".join([names.get(task, task), metric, *([] if kind == "none" else [kind])]), float(value)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """The global random generators seeded as lm-eval does it, and restored."""
    before = random.getstate(), np.random.get_state()
    random.seed(_SEEDS[0])
    np.random.seed(_SEEDS[1])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _library_tokenizer(tokenizer: Tokenizer) -> Any:
    """The tokenizer as transformers loads it, with its chat template."""
    if tokenizer.library is None:
        raise UserError(f"eval_harness: benchmarks are texts, but the tokenizer is {tokenizer.path}")
    from lmtrain.hf.find_tokenizer import open_in_transformers

    return open_in_transformers(tokenizer.path)
