"""Files and lines per package, compared with the budget in pyproject.toml."""

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measure(root: Path) -> tuple[Counter[str], Counter[str]]:
    """Python files, and their lines, by package of lmtrain/ (`.` is the top level), and of tests/."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in [*(root / "lmtrain").rglob("*.py"), *(root / "tests").rglob("*.py")]:
        top, *folders, _ = path.relative_to(root).parts
        package = top if top == "tests" else folders[0] if folders else "."
        files[package] += 1
        lines[package] += len(path.read_text(encoding="utf-8").splitlines())
    return files, lines


def over_budget(files: Counter[str], lines: Counter[str], budget: dict[str, int]) -> list[str]:
    """One text for each number above its budget."""
    found = {"files": files.total() - files["tests"], "lines": lines.total() - lines["tests"]}
    found["test_lines"] = lines["tests"]
    return [f"{name}: {found[name]:,}, budget {most:,}" for name, most in budget.items() if found[name] > most]


def main() -> int:
    files, lines = measure(ROOT)
    for package in sorted(files):
        print(f"{package:<12} {files[package]:>4} files {lines[package]:>7,} lines")
    total = files.total() - files["tests"]
    print(f"{'lmtrain':<12} {total:>4} files {lines.total() - lines['tests']:>7,} lines")
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lmtrain"]["budget"]
    exceeded = over_budget(files, lines, budget)
    for text in exceeded:
        print(f"over the budget in pyproject.toml: {text}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
