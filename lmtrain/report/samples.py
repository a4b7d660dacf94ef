"""Samples of text that a run generated while it trained: `<log_dir>/<run_id>/samples.jsonl`, a JSON object per line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.report.html import Markup, element, table

NAME = "samples.jsonl"

_MOST_STEPS = 100  # of a prompt
_OPEN_STEPS = 3


@dataclass(frozen=True)
class Sample:
    """The text that the model generated for a prompt after `step` updates."""

    step: int
    prompt: str
    text: str


def read_samples(path: str, notices: list[str]) -> list[Sample]:
    """One sample per prompt and step, the last one in the file; none if there is no file.

    Adds a notice for lines that are not samples. An incomplete last line is ignored: the run may still be writing it.
    """
    found: dict[tuple[str, int], Sample] = {}
    unreadable = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                sample = _parse(line)
                if sample is None:
                    unreadable += line.endswith("\n") and not line.isspace()
                else:
                    found[sample.prompt, sample.step] = sample
    except FileNotFoundError:
        return []
    except OSError as error:
        notices.append(f"{path} cannot be read: {error.strerror or error}")
        return []
    if unreadable:
        notices.append(f"{unreadable:,} lines of {path} are not samples, and are left out")
    return list(found.values())


def _parse(line: str) -> Sample | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    step, prompt, text = (entry.get(name) for name in ("step", "prompt", "text"))
    if type(step) is not int or not isinstance(prompt, str) or not isinstance(text, str):
        return None
    return Sample(step, prompt, text)


def samples_tables(samples: Sequence[Sample]) -> Markup:
    """A table for each prompt, in the order of the file, with a row for each step, newest first."""
    parts: list[str] = []
    for prompt in dict.fromkeys(sample.prompt for sample in samples):
        of_prompt = sorted((each for each in samples if each.prompt == prompt), key=lambda each: -each.step)
        rows = [[f"step {sample.step:,}", sample.text] for sample in of_prompt[:_MOST_STEPS]]
        parts += [element("h3", prompt), table([], rows[:_OPEN_STEPS], class_="text samples")]
        if len(rows) > _OPEN_STEPS:
            earlier = table([], rows[_OPEN_STEPS:], class_="text samples")
            parts.append(element("details", element("summary", "Earlier steps"), earlier))
        if len(of_prompt) > len(rows):
            parts.append(element("p", element("small", f"{len(of_prompt) - len(rows):,} earlier steps are not shown.")))
    return Markup("".join(parts))
