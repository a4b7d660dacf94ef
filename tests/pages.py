"""Running what a page for people says, as written."""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from conftest import TRAIN_FILES, VALIDATION_FILES, run_in_process
from forked import Forked, ended, run_script

ROOT = Path(__file__).parent.parent


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """The language and the text of each fenced block of the page in these languages, in order."""
    found = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def write_own_text(folder: Path) -> Path:
    """Write `my_text`, which the README trains on. -> the folder"""
    (folder / "my_text").mkdir()
    for name, source in (("train.jsonl", TRAIN_FILES[0]), ("validation.jsonl", VALIDATION_FILES[0])):
        lines = [{"text": json.loads(line)["text"]} for line in Path(source).read_text().splitlines()]
        (folder / "my_text" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run_as_written(
    folder: Path, command: str, extra: Sequence[str] = (), *, optimized: bool = False
) -> subprocess.CompletedProcess:
    """Run `lmtrain ...`, with more arguments; it has to succeed.

    `optimized`: in a process of its own that compiles with optimization, as for users, which pays for many steps.
    """
    quoted = " ".join(f"'{word}'" for word in extra)
    words = ["bash", "-c", f"printf '%s\\0' {command} {quoted}"]  # the shell expands quotes and globs
    arguments = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout.split("\0")
    if optimized:
        output = folder / "optimized.txt"
        with ended(Forked(arguments[1:-1], folder, output, XLA_FLAGS="")) as (process,):
            code = process.wait(600)
        done = subprocess.CompletedProcess(command, code, "", output.read_text())
    else:
        done = run_in_process(arguments[1:-1], folder)
    assert done.returncode == 0, (command, done.stderr)
    return done


def follow(folder: Path, page: Path, skip: Sequence[str] = (), short: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Follow the page in its order: write its configs, run its commands and programs, which have to succeed.

    Yields each command, or the name of a program, with its output. `skip` are the beginnings of commands that another
    test runs; those of `short` train for a few steps only.
    """
    for language, text in blocks(page, "yaml", "bash", "python"):
        name = re.match(r"# ([\w.]+)\n", text)
        if language == "yaml":
            assert name, text
            (folder / name[1]).write_text(text)
        elif language == "python":
            yield name[1] if name else "", run_script(text, folder=folder)
        else:
            for command in text.splitlines():
                if not command.startswith(tuple(skip)):
                    extra = ["--trainer.num_train_steps", "10"] if command in short else []
                    optimized = command.startswith("lmtrain train ") and not extra
                    yield command, run_as_written(folder, command, extra, optimized=optimized).stdout
