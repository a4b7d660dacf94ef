"""The texts of the items of benchmarks, to search training data for them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.tasks import load_tasks, quiet


class BenchmarkItem(NamedTuple):
    """An item of a task: its number among those that are evaluated, and the question with each answer."""

    task: str
    number: int
    texts: tuple[str, ...]


def load_items(config: EvalHarnessConfig) -> Iterator[BenchmarkItem]:
    """All items of the tasks. Raises `UserError` as `load_tasks` does."""
    tasks, _ = load_tasks(config)
    for name, task in tasks["tasks"].items():
        with quiet():
            documents = task.eval_docs
        for number, document in enumerate(documents):
            yield BenchmarkItem(name, number, _texts(task, document))


def _texts(task: Any, document: Any) -> tuple[str, ...]:
    """The question with each choice, or with the answer; of tasks whose questions differ, each with the answer."""
    question, answer = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if getattr(task.config, "doc_to_choice", None) is not None else []
    if isinstance(question, int):
        return tuple(f"{choice} {answer}" for choice in choices)
    answers = choices or (answer if isinstance(answer, list) else [answer])
    return tuple(f"{question} {answer}" for answer in answers if isinstance(answer, str)) or (str(question),)
