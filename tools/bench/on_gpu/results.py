"""What a part of the benchmark finds: tables and verdicts, as lines of JSON, which outlive a process that is killed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows have the names of columns; a cell may be missing, and a row may lack a column of another."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    name: str
    passed: bool
    text: str


Result = Table | Verdict
_KINDS = {"table": Table, "verdict": Verdict}


def write_result(file: Path, result: Result) -> None:
    kind = "table" if isinstance(result, Table) else "verdict"
    with open(file, "a") as lines:
        lines.write(json.dumps({kind: asdict(result)}) + "\n")


def read_results(file: Path) -> list[Result]:
    if not file.exists():
        return []
    lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [_KINDS[kind](**fields) for line in lines for kind, fields in json.loads(line).items()]
