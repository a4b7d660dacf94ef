"""The report: one section of Markdown for deploy/performance.md."""

import datetime
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from on_gpu.results import Result, Table, Verdict


def report(device: Mapping[str, str], results: Sequence[Result], seconds: float, dry: bool) -> str:
    """A heading of the third level with card and date, versions, verdicts, tables."""
    lines = [f"### {device['kind']}, {datetime.date.today():%Y-%m-%d}", ""]
    if dry:
        lines += ["Dry run with nano sizes: the times mean nothing, and shares are relative to an H100.", ""]
    lines += [f"`tools/bench/gpu.py`, {seconds:.0f} s. {versions()}.", ""]
    checks = [
        {"check": result.name, "result": "passed" if result.passed else "WRONG", "details": result.text}
        for result in results
        if isinstance(result, Verdict)
    ]
    lines += [*markdown(checks), ""]
    for result in results:
        if isinstance(result, Table):
            lines += [f"{result.title}:", "", *markdown(result.rows), ""]
    return "\n".join(lines)


def versions() -> str:
    """Card and driver, commit, and the packages that the figures depend on."""
    query = "name,driver_version,memory.total,power.limit"
    card = printed("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0") or "no NVIDIA driver"
    commit = printed("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    named = re.compile(r"jax(lib|-cuda\d+-plugin)?|torch|nvidia-(cudnn|cuda-runtime|cublas)(-cu\d+)?")
    found = {one.metadata["Name"]: one.version for one in distributions()}
    packages = [f"{name} {found[name]}" for name in sorted(found) if named.fullmatch(name)]
    return f"{card}; lmtrain {commit or 'of an unknown commit'}; {', '.join(packages)}"


def printed(*command: str) -> str:
    """The first line that a command prints; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table, with the columns of all rows in the order in which they appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = [f"| {' | '.join(cell(row.get(name, '')) for name in names)} |" for row in rows]
    return [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}", *body]


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "/").replace("\n", " ")
