"""Make pairs of answers of the demo: which lines follow in a program? `python tools/demo_pairs.py [FOLDER]`.

Reads FOLDER/train.*.jsonl.gz and FOLDER/validation.jsonl.gz, which `lmtrain train` makes for the demo (default: demo).
Writes FOLDER/pairs.train.jsonl and FOLDER/pairs.validation.jsonl: the prompt is some lines of the standard library, the
preferred answer the lines that follow, the other one lines of another place. The same demo gives the same bytes.
"""

import json
import os
import random
import sys

from demo_texts import demo_files, texts

PAIRS = {"train": 4000, "validation": 200}
LINES_OF_PROMPT, LINES_OF_ANSWER = 4, 3


def pieces(files: list[str]) -> list[tuple[str, str]]:
    """Lines of the files, and those that follow them."""
    found = []
    for text in texts(files):
        lines = [line for line in text.splitlines(keepends=True) if line.strip()]
        size = LINES_OF_PROMPT + LINES_OF_ANSWER
        for start in range(0, len(lines) - size, size):
            middle = start + LINES_OF_PROMPT
            found.append(("".join(lines[start:middle]), "".join(lines[middle : start + size])))
    return found


def main(folder: str) -> int:
    files = demo_files(folder, "demo_pairs")
    if files is None:
        return 2
    for split, count in PAIRS.items():
        found, dice = pieces(files[split]), random.Random(split)
        path = os.path.join(folder, f"pairs.{split}.jsonl")
        with open(path, "w", encoding="utf-8") as file:
            for prompt, chosen in dice.sample(found, count):
                _, rejected = dice.choice(found)
                row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{path}: {count:,} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "demo"))
