"""Make a chat corpus of the demo: questions about lines of Python, `python tools/demo_chat.py [FOLDER]`.

Reads FOLDER/train.*.jsonl.gz and FOLDER/validation.jsonl.gz, which `lmtrain train` makes for the demo (default: demo).
Writes to FOLDER/chat: train.jsonl and validation.jsonl, conversations of real lines of the standard library; and
tasks/, a benchmark of the validation file for `lmtrain eval --tasks line_kinds`. The same demo gives the same bytes.
"""

import json
import os
import random
import re
import sys

import yaml
from demo_texts import demo_files, texts

QUESTION = "What does this line do?\n"
# Answer -> the lines that it describes.
KINDS = {
    "It defines a function.": re.compile(r"def \w+\(.*\):"),
    "It defines a class.": re.compile(r"class \w+.*:"),
    "It imports a module.": re.compile(r"(import [\w.]+|from [\w.]+ import \w.*)"),
    "It returns a value.": re.compile(r"return .+"),
    "It raises an exception.": re.compile(r"raise \w+.*"),
    "It checks a condition.": re.compile(r"(if|elif|while) .+:"),
    "It is a comment.": re.compile(r"# \w.*"),
    "It is an assertion.": re.compile(r"(assert .+|self\.assert\w+\(.+\))"),
}
CONVERSATIONS = {"train": 4000, "validation": 200}
LONGEST_LINE, EXAMPLES = 80, 400


def lines_by_kind(files: list[str]) -> dict[str, list[str]]:
    """Different lines of the files, by the answer that describes them, in the order of the files."""
    found: dict[str, dict[str, None]] = {answer: {} for answer in KINDS}
    for line in (line.strip() for text in texts(files) for line in text.splitlines()):
        if len(line) <= LONGEST_LINE:
            answer = next((answer for answer, pattern in KINDS.items() if pattern.fullmatch(line)), None)
            if answer is not None:
                found[answer][line] = None
    return {answer: list(lines) for answer, lines in found.items()}


def conversation(lines: dict[str, list[str]], dice: random.Random) -> list[dict[str, str]]:
    """One to three questions with their answers."""
    messages = []
    for _ in range(dice.randint(1, 3)):
        answer = dice.choice(list(lines))
        messages.append({"role": "user", "content": QUESTION + dice.choice(lines[answer])})
        messages.append({"role": "assistant", "content": answer})
    return messages


def write_task(folder: str, lines: dict[str, list[str]], dice: random.Random) -> None:
    """A task of lm-eval: choose the answer to a question."""
    os.makedirs(folder, exist_ok=True)
    answers = list(KINDS)
    rows = []
    for number in range(EXAMPLES):
        answer = answers[number % len(answers)]
        rows.append({"question": QUESTION + dice.choice(lines[answer]), "answer": answers.index(answer)})
    data = os.path.join(folder, "line_kinds.jsonl")
    _write_rows(data, rows)
    task = {
        "task": "line_kinds",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": os.path.abspath(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": answers,
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    with open(os.path.join(folder, "line_kinds.yaml"), "w", encoding="utf-8") as file:
        yaml.safe_dump(task, file, sort_keys=False)


def _write_rows(path: str, rows: list[dict]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(folder: str) -> int:
    files = demo_files(folder, "demo_chat")
    if files is None:
        return 2
    chat = os.path.join(folder, "chat")
    os.makedirs(chat, exist_ok=True)
    for split, count in CONVERSATIONS.items():
        lines, dice = lines_by_kind(files[split]), random.Random(split)
        rows = [{"messages": conversation(lines, dice)} for _ in range(count)]
        _write_rows(os.path.join(chat, f"{split}.jsonl"), rows)
    write_task(os.path.join(chat, "tasks"), lines, dice)
    print(f"{chat}: {CONVERSATIONS['train']:,} conversations, and the task line_kinds")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "demo"))
