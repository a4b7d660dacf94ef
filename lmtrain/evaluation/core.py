"""CORE (Li et al. 2024, "DataComp-LM"): tasks with examples in the prompt, each answer compared by its likelihood.

The metric is the mean over the tasks of (accuracy - guessing) / (1 - guessing). Prompts, choice of examples and scores
are those of nanochat's `core_eval`, so that its published figures can be compared:

    multiple_choice      one query with several choices: the choice with the lowest loss per token
    schema               several contexts with one continuation: the context that makes it most likely
    language_modeling    one context: every token of the continuation is the most likely one

One kind is not nanochat's: `completion` is multiple_choice as llm.c scores HellaSwag. There, tokens that all choices
begin with count too, which changes the mean over the tokens of a choice.
"""

import csv
import io
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import yaml

from lmtrain.evaluation.config import CoreConfig, EvaluationConfig
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.scorer import Question, Scorer
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.storage import join, read_bytes

_SETTING = "trainer.core.bundle"
# Seeds of nanochat: of the order of a task's items, and, plus the number of an item, of its examples.
_ORDER, _EXAMPLES = 1337, 1234
# For each kind of task, the keys of its items and the types of their values.
_KEYS: dict[str, dict[str, type]] = {
    **{key: {"query": str, "choices": list, "gold": int} for key in ("multiple_choice", "completion")},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
# Items whose prompts are in memory at once.
_AT_ONCE = 1024

Item = Mapping[str, Any]


class CoreTask(NamedTuple):
    """A task of core.yaml: its name, kind, file, number of examples in a prompt, the text between question and answer,
    and the accuracy of guessing."""

    label: str
    kind: str
    file: str
    shots: int
    delimiter: str
    guessing: float


class Core:
    """The evaluator of `trainer.core`. Metrics are `metric`, and `<task>` and `<task>/centered` of each task."""

    name = "core"
    optional = True

    def __init__(self, config: CoreConfig):
        self.every = config.steps
        self._config = config

    def prepare(self, context: Context) -> bool:
        """Raises `UserError` for a folder or a file that is no such task."""
        tokenizer = context.tokenizer
        ids = [number for number in (tokenizer.bos_id, tokenizer.eos_id) if number is not None]
        if tokenizer.library is None or (self._config.prepend_bos and not ids):
            raise UserError(
                f"trainer.core: the tokenizer {tokenizer.path} has no text, or neither a bos nor an eos token; set "
                "trainer.core to null, or prepend_bos to false"
            )
        self._first = ids[:1] if self._config.prepend_bos else []
        self._tasks = read_tasks(self._config.bundle)
        for task in self._tasks:
            number = min(len(read_items(task)), self._config.max_examples or math.inf)
            if number <= task.shots:
                what = task.file if self._config.max_examples is None else "trainer.core.max_examples"
                raise UserError(
                    f"{what}: {number} items, but prompts of {task.label} have {task.shots} examples besides their own"
                )
        self._context = context
        self._scorer = Scorer(context)
        return True

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for task in self._tasks:
            items = read_items(task)
            random.Random(_ORDER).shuffle(items)
            accuracy = self._accuracy(params, task, items[: self._config.max_examples])
            metrics |= {task.label: accuracy, f"{task.label}/centered": centered(accuracy, task.guessing)}
        values = [metrics[f"{task.label}/centered"] for task in self._tasks]
        return {"metric": sum(values) / len(values), **metrics}

    def describe(self, metrics: Mapping[str, Any]) -> str:
        return f"CORE {metrics['eval/core/metric']:.4f} over {counted(len(self._tasks), 'task')}"

    def _accuracy(self, params: Any, task: CoreTask, items: Sequence[Item]) -> float:
        right = 0
        for begin in range(0, len(items), _AT_ONCE):
            numbers = range(begin, min(begin + _AT_ONCE, len(items)))
            right += self._right(params, task, items, numbers)
            self._context.progress(numbers.stop, len(items), f"items of {task.label}")
        return right / len(items)

    def _right(self, params: Any, task: CoreTask, items: Sequence[Item], numbers: range) -> int:
        """How many of the items with these numbers are answered correctly."""
        questions = [
            [self._question(task, *span) for span in self._spans(task, items[n], examples_of(task, items, n))]
            for n in numbers
        ]
        asked = [question for group in questions for question in group if question is not None]
        answers = iter(self._scorer.score(params, asked))
        right = 0
        for number, group in zip(numbers, questions, strict=True):
            found = [(None if question is None else next(answers), question) for question in group]
            if task.kind == "language_modeling":
                right += all(answer is not None and answer.is_greedy for answer, _ in found)
                continue
            losses = [-a.log_likelihood / len(q.targets) if a and q else math.nan for a, q in found]
            right += losses.index(min(losses)) == items[number]["gold"]
        return right

    def _spans(self, task: CoreTask, item: Item, examples: Sequence[Item]) -> list[tuple[list[int], int]]:
        """The tokens of each prompt, and the number of the first one that is scored; the last one is the last."""
        rows = [self._encode(prompt) for prompt in prompts_of(task, item, examples)]
        if task.kind == "language_modeling":
            without, complete = rows
            return [(complete, _common(without, complete))]
        if task.kind == "multiple_choice":
            return [(row, _common(*rows)) for row in rows]
        if task.kind == "completion":
            query, *rows = rows
            return [(row, _common(query, row)) for row in rows]
        return [(row, len(row) - _common(*(row[::-1] for row in rows))) for row in rows]

    def _encode(self, text: str) -> list[int]:
        with self._context.tokenizer.errors():
            ids: list[int] = self._context.tokenizer.backend.encode(text, add_special_tokens=False).ids
        return self._first + ids

    def _question(self, task: CoreTask, tokens: list[int], start: int) -> Question | None:
        """The question about the tokens from `start` on; None if there are none, as for two equal choices."""
        cut = max(0, len(tokens) - self._context.seq_len)
        if start - cut < 1:
            raise UserError(
                f"{task.file}: an answer of {len(tokens) - start} tokens does not fit into model.seq_len "
                f"{self._context.seq_len}; leave this task out of {join(self._config.bundle, 'core.yaml')}"
            )
        return Question(tuple(tokens[cut:-1]), tuple(tokens[start:])) if start < len(tokens) else None


def build(config: EvaluationConfig) -> Core | None:
    """The evaluator of a run with `core`."""
    return None if config.core is None else Core(config.core)


def centered(accuracy: float, guessing: float) -> float:
    """0 for guessing, 1 for all answers."""
    return (accuracy - guessing) / (1 - guessing)


def read_tasks(folder: str) -> list[CoreTask]:
    """The tasks of a folder with core.yaml, eval_meta_data.csv and eval_data/. Raises `UserError`."""
    path, table = join(folder, "core.yaml"), join(folder, "eval_meta_data.csv")
    text, guessing = _read(path), _read_baselines(table)
    try:
        listed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f":{mark.line + 1}"
        raise UserError(f"{path}{where}: invalid YAML: {getattr(error, 'problem', None) or error}") from None
    entries = listed.get("icl_tasks") if isinstance(listed, dict) else None
    if not entries or not isinstance(entries, list):
        raise UserError(f"{path}: expected a list of tasks, icl_tasks")
    return [_read_task(path, folder, number, entry, guessing) for number, entry in enumerate(entries)]


def _read_task(path: str, folder: str, number: int, entry: Any, guessing: Mapping[str, float]) -> CoreTask:
    values = entry if isinstance(entry, dict) else {}
    label, kind, file = (values.get(name) for name in ("label", "icl_task_type", "dataset_uri"))
    shots, delimiter = values.get("num_fewshot"), values.get("continuation_delimiter", " ")
    shots = shots[0] if isinstance(shots, list) and shots else None
    where = f"{path}: icl_tasks[{number}]"
    if not (isinstance(label, str) and isinstance(file, str)):
        raise UserError(f"{where}: expected label and dataset_uri, two texts")
    if kind not in _KEYS:
        raise UserError(f"{where}, {label}: icl_task_type {kind} is none of {', '.join(_KEYS)}")
    if type(shots) is not int or shots < 0:
        raise UserError(f"{where}, {label}: expected num_fewshot as a list of one number, 0 or more")
    if not isinstance(delimiter, str):
        raise UserError(f"{where}, {label}: continuation_delimiter: expected a text, got {delimiter!r}")
    if label not in guessing:
        raise UserError(f"{where}, {label}: eval_meta_data.csv has no such Eval Task")
    return CoreTask(label, str(kind), join(folder, "eval_data", file), shots, delimiter, guessing[label])


def _read_baselines(path: str) -> dict[str, float]:
    """The accuracy of guessing by task. Raises `UserError` with the line of one that is no percentage."""
    rows = csv.DictReader(io.StringIO(_read(path).removeprefix("\ufeff")))
    found: dict[str, float] = {}
    for row in rows:
        label, percent = row.get("Eval Task"), row.get("Random baseline")
        try:
            value = float(percent or "")
        except ValueError:
            value = math.nan
        if label is None or not 0 <= value < 100:
            raise UserError(
                f"{path}:{rows.line_num}: expected the columns Eval Task and Random baseline, from 0 to below 100, got "
                f"{percent!r}"
            )
        found[label] = value / 100
    return found


def read_items(task: CoreTask) -> list[Item]:
    """The items of a task. Raises `UserError` with the line of one that is not of its kind."""
    items: list[Item] = []
    for number, line in enumerate(_read(task.file).split("\n"), 1):
        if line and not line.isspace():
            try:
                item = json.loads(line)
            except ValueError as error:
                raise UserError(f"{task.file}:{number}: invalid JSON: {error}") from None
            if reason := _problem(item, task.kind):
                raise UserError(f"{task.file}:{number}: {reason}")
            items.append(item)
    if not items:
        raise UserError(f"{task.file}: has no items")
    return items


def _problem(item: Any, kind: str) -> str:
    """What is wrong with an item; empty if it is right."""
    if not isinstance(item, dict):
        return "expected an object"
    for key, expected in _KEYS[kind].items():
        value = item.get(key)
        is_right = type(value) is expected
        if isinstance(value, list):
            is_right = is_right and all(isinstance(part, str) for part in value)
        if not is_right:
            what = {str: "a text", list: "a list of texts", int: "the number of the right answer"}[expected]
            return f"expected {key}, {what}" + ("" if key not in item else f", got {value!r}")
    options = item.get("choices" if "choices" in _KEYS[kind] else "context_options")
    if options is not None and not 0 <= item["gold"] < len(options):
        return f"gold {item['gold']} is none of the {len(options)} answers, which count from 0"
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "has a surrogate, which is no character"
    return ""


def _read(path: str) -> str:
    try:
        return read_bytes(path).decode()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{_SETTING}: {path} does not exist; unpack nanochat's eval_bundle.zip there") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: invalid UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def examples_of(task: CoreTask, items: Sequence[Item], number: int) -> list[Item]:
    """The examples in the prompt of an item, others than itself."""
    if not task.shots:
        return []
    chosen = random.Random(_EXAMPLES + number).sample(range(len(items) - 1), task.shots)
    return [items[index + (index >= number)] for index in chosen]  # without the item itself


def prompts_of(task: CoreTask, item: Item, examples: Sequence[Item]) -> list[str]:
    """The prompts with each choice, for a completion after one without; with each context; or without and with
    the continuation."""
    before = "".join(f"{text}\n\n" for text in _answered(task, examples))
    if task.kind == "multiple_choice":
        return [f"{before}{item['query']}{task.delimiter}{choice}" for choice in item["choices"]]
    if task.kind == "completion":
        return [before + item["query"], *prompts_of(task._replace(kind="multiple_choice"), item, examples)]
    if task.kind == "schema":
        return [f"{before}{context}{task.delimiter}{item['continuation']}" for context in item["context_options"]]
    question = f"{before}{item['context'].strip()}{task.delimiter}"
    # without the space at its end, which belongs to the first token of the continuation
    return [question.strip(), question + item["continuation"]]


def _answered(task: CoreTask, examples: Sequence[Item]) -> Iterator[str]:
    for each in examples:
        if task.kind in ("multiple_choice", "completion"):
            yield f"{each['query']}{task.delimiter}{each['choices'][each['gold']]}"
        elif task.kind == "schema":
            yield f"{each['context_options'][each['gold']]}{task.delimiter}{each['continuation']}"
        else:
            yield f"{each['context'].strip()}{task.delimiter}{each['continuation']}"


def _common(*rows: Sequence[int]) -> int:
    """How many tokens all rows begin with."""
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False)))
