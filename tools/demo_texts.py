"""The texts of the demo, for the tools that make other data of them."""

import glob
import gzip
import json
import os
import sys
from collections.abc import Iterator


def demo_files(folder: str, tool: str) -> dict[str, list[str]] | None:
    """The files of each split; None, with a message from `tool`, if some are missing."""
    files = {
        "train": sorted(glob.glob(os.path.join(folder, "train.*.jsonl.gz"))),
        "validation": [os.path.join(folder, "validation.jsonl.gz")],
    }
    needed = [*(files["train"] or [os.path.join(folder, "train.1-of-8.jsonl.gz")]), *files["validation"]]
    missing = [path for path in needed if not os.path.exists(path)]
    if not missing:
        return files
    print(
        f"{tool}: error: {missing[0]} not found; `lmtrain preprocess configs/llama_nano.yaml` makes the demo",
        file=sys.stderr,
    )
    return None


def texts(files: list[str]) -> Iterator[str]:
    """The texts of these files, in order."""
    for path in files:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for record in file:
                yield json.loads(record)["text"]
