"""How much of the source is held by tests: small changes with fixed seeds, and whether the tests near them fail.

    .venv/bin/python tools/mutate.py [--number 200] [--seed 0] [--packages train data checkpoint optim hf] [--out FILE]

Each change is one of: a comparison or an arithmetic operator becomes another, a number grows by one, true becomes
false, a condition its opposite, `and` becomes `or`, a call of which nobody takes the result goes. It is made in a copy
of the checkout; tests that import the changed module or are near it run until the first one fails. A change
is detected if a test fails that passes without it, or if the tests take ten minutes. Prints the survivors as diffs and
the share that was detected; `--out` appends a JSON line for each change, and a change in that file is not tried again.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
             ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
             ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}  # fmt: skip
_MOST_SECONDS = 600.0
_MOST_FILES = 12
_USED_BY_RUNS = ("lmtrain/train", "lmtrain/hf", "lmtrain/checkpoint")
_RUNS = ("train", "export")


class Place(NamedTuple):
    """The `index`-th node that can be changed of a file."""

    path: str
    index: int


def changeable(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that `change` knows, in the order of the file; annotations, messages and docstrings are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        is_number = isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float)
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_said(node.value)
        known = isinstance(node, ast.BoolOp | ast.If | ast.IfExp) or is_number or is_call
        known |= isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED
        known |= isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED and not _is_union(node)
        if known:
            yield node
        if isinstance(node, ast.AnnAssign | ast.arg):
            if getattr(node, "value", None) is not None:
                yield from changeable(ast.Module([ast.Expr(node.value)], []))
            continue
        yield from changeable(node)


def _is_said(call: ast.Call) -> bool:
    """Logging and printing: their words are nobody's contract."""
    return bool(re.match(r"(log\.|print\b|warnings\.)", ast.unparse(call.func)))


def _is_union(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right))


def change(node: ast.AST) -> None:
    """Turn a node into another of its kind, in place."""
    match node:
        case ast.Compare():
            node.ops[0] = _COMPARED[type(node.ops[0])]()
        case ast.BinOp():
            node.op = _COMPUTED[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.If() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant():
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        case ast.Expr():
            node.value = ast.Constant(None)


def changed(source: str, index: int) -> str:
    tree = ast.parse(source)
    change(list(changeable(tree))[index])
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def all_places(packages: list[str]) -> list[Place]:
    paths = sorted(path for name in packages for path in (ROOT / "lmtrain" / name).rglob("*.py"))
    return [
        Place(str(path.relative_to(ROOT)), index)
        for path in paths
        for index, _ in enumerate(changeable(ast.parse(path.read_text(encoding="utf-8"))))
    ]


def choose(places: list[Place], number: int, rng: random.Random) -> list[Place]:
    """`number` places at random, the change of which makes another program."""
    chosen = [place for place in rng.sample(places, number) if _makes_a_difference(place)]
    left = sorted(set(places) - set(chosen))
    while len(chosen) < number:
        place = left.pop(rng.randrange(len(left)))
        chosen += [place] if _makes_a_difference(place) else []
    return chosen


def _makes_a_difference(place: Place) -> bool:
    source = (ROOT / place.path).read_text(encoding="utf-8")
    return changed(source, place.index) != ast.unparse(ast.parse(source)) + "\n"


def tests_near(path: str) -> list[str]:
    """Test files for a module: that of its name, those that name it, the rest of its folder; then runs end to end."""
    module = path.removesuffix(".py").replace("/", ".")
    own = ROOT / "tests" / Path(path).relative_to("lmtrain").with_name(f"test_{Path(path).name}")
    naming = re.compile(rf"\b{re.escape(module)}\b")
    all_files = [file for file in (ROOT / "tests").rglob("test_*.py") if "compiled" not in file.parts]
    named = {file for file in all_files if naming.search(file.read_text(encoding="utf-8"))}
    files = [file for file in all_files if file in named or file.parent == own.parent]
    files.sort(key=lambda file: (file != own, file not in named, "multihost" in file.parts, file.stat().st_size))
    runs = [ROOT / "tests" / "end_to_end" / f"test_{name}.py" for name in _RUNS if path.startswith(_USED_BY_RUNS)]
    return [str(file.relative_to(ROOT)) for file in (*files[:_MOST_FILES], *runs)]


class Checkout:
    """A copy of the source in which changes are made and tests run."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._passing: set[str] = set()  # tests that pass on unchanged source
        self._failing: set[str] = set()  # tests that fail on it, for example because a copy has no .git
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache"))

    def try_change(self, place: Place) -> dict[str, object]:
        """Make one change, run the tests near it, take it back. -> where it is, what failed, how long it took"""
        file, tests, started = self._folder / place.path, tests_near(place.path), time.monotonic()
        source = file.read_text(encoding="utf-8")
        before, after = ast.unparse(ast.parse(source)) + "\n", changed(source, place.index)
        while True:
            file.write_text(after, encoding="utf-8")
            try:
                failed = self._first_failure(tests)
            finally:
                file.write_text(source, encoding="utf-8")
            if failed is None or failed == "timeout" or self._passes(failed):
                break
        diff = "\n".join(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:])
        seconds = round(time.monotonic() - started, 1)
        return {**place._asdict(), "detected": failed is not None, "test": failed, "seconds": seconds, "diff": diff}

    def _passes(self, test: str) -> bool:
        if test not in self._passing | self._failing:
            (self._passing if self._first_failure([test]) is None else self._failing).add(test)
        return test in self._passing

    def _first_failure(self, tests: list[str]) -> str | None:
        """The name of the first test (or file) that fails; "timeout" if none did in time; None if all pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "not long", *tests]
        command += [word for test in self._failing for word in ("--deselect", test)]
        environment = os.environ | {"PYTHONPATH": str(self._folder), "HF_HUB_OFFLINE": "1"}
        keywords: dict = {"cwd": self._folder, "env": environment, "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, timeout=_MOST_SECONDS, **keywords)
        except subprocess.TimeoutExpired:
            return "timeout"
        if done.returncode in (0, 5):  # 5: no test was left to run
            return None
        found = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", done.stdout, re.MULTILINE)
        return found[1] if found else f"exit code {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=["train", "data", "checkpoint", "optim", "hf"])
    parser.add_argument("--out", help="file of JSON lines")
    arguments = parser.parse_args()
    places = choose(all_places(arguments.packages), arguments.number, random.Random(arguments.seed))
    known: dict[Place, bool] = {}
    if arguments.out and os.path.exists(arguments.out):
        for line in Path(arguments.out).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            known[Place(entry["path"], entry["index"])] = entry["detected"]
    with tempfile.TemporaryDirectory() as temporary:
        checkout = Checkout(Path(temporary) / "copy")
        for number, place in enumerate(places, start=1):
            if place not in known:
                entry = checkout.try_change(place)
                known[place] = bool(entry["detected"])
                if arguments.out:
                    with open(arguments.out, "a", encoding="utf-8") as lines:
                        lines.write(json.dumps(entry) + "\n")
                if not known[place]:
                    print(entry["diff"])
            verdict = "detected" if known[place] else "SURVIVED"
            print(f"{number}/{len(places)} {place.path} {place.index}: {verdict}", flush=True)
    share = sum(known[place] for place in places) / len(places)
    print(f"{share:.1%} of {len(places)} changes were detected")


if __name__ == "__main__":
    main()
