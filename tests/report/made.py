"""Files of runs for tests of reports, and a strict parser of the pages."""

import json
import math
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from lmtrain.report.page import script
from lmtrain.report.run import LoggedRun, find_run, read_run

WITHOUT_END = {"meta", "br", "img", "link", "input", "hr"}


def read(folder: Path, run: str = "one") -> LoggedRun:
    return read_run(find_run(run, str(folder)), run)


def write_log(folder: Path, run: str, lines: list[dict], torn: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run}.metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn, encoding="utf-8")
    return path


def training(steps: int = 40, offset: float = 0.0, sets: tuple[str, ...] = ("books", "code")) -> list[dict]:
    """The lines of a run that evaluates every ten steps."""
    lines: list[dict] = [{"step": 0, "parameter_count": 1234567, "throughput/device_kind": "abacus"}]
    for step in range(1, steps + 1):
        loss = 3 + offset + 6 * math.exp(-step / 5)
        line = {
            "step": step,
            "train/loss": loss,
            "train/learning_rate": 1e-3 * step / steps,
            "train/gradient_norm": 1.0 + 0.1 * (step % 3),
            "throughput/tokens_per_second": 5000.0 + step,
            "throughput/duration": 0.5,
            "grad/norm/blocks/kernel": 0.25,
        }
        lines.append(line)
        if step % 10 == 0:
            means = {"eval/loss": loss + 0.1, "eval/bpb": loss / 3}
            lines.append({"step": step, **means, **{f"eval/{name}/loss": loss + 0.2 for name in sets}})
    return lines


def attempt(started: float, updated: float, first: int, last: int, facts: dict | None = None, **seconds: float) -> dict:
    facts = {"device": "abacus"} if facts is None else facts
    times = {"started": started, "updated": updated, "first_step": first, "last_step": last}
    return {**times, "seconds": seconds, "facts": facts}


def write_ledger(folder: Path, run: str, attempts: list[dict]) -> None:
    (folder / run).mkdir(parents=True, exist_ok=True)
    (folder / run / "goodput.json").write_text(json.dumps({"attempts": attempts}))


def write_config(folder: Path, run: str, text: str) -> None:
    (folder / run).mkdir(parents=True, exist_ok=True)
    (folder / run / "config.yaml").write_text(text, encoding="utf-8")


def write_samples(folder: Path, *samples: tuple[object, ...], end: str = "") -> str:
    """`samples` are steps, prompts and texts. Returns the path of the file."""
    (folder / "one").mkdir(exist_ok=True)
    path = folder / "one" / "samples.jsonl"
    keys = ("step", "prompt", "text")
    path.write_text("".join(json.dumps(dict(zip(keys, each, strict=True))) + "\n" for each in samples) + end)
    return str(path)


def write_complete(folder: Path, run: str = "one", offset: float = 0.0, rate: float = 6e-4) -> Path:
    """A complete run of 40 steps that was killed after step 25 and resumed from step 20."""
    path = write_log(folder, run, training(offset=offset))
    versions = {"versions": {"jax": "0.10.2"}}
    first = attempt(1e9, 1e9 + 100, 0, 25, versions, start_up=10.0, steps=50.0, compile=40.0)
    second = attempt(1e9 + 150, 1e9 + 250, 20, 40, versions, start_up=10.0, steps=90.0)
    write_ledger(folder, run, [first, second])
    write_config(folder, run, f"optimizer:\n  learning_rate: {rate}  # my.yaml:3\ntrainer:\n  num_train_steps: 40\n")
    return path


@dataclass
class Page(HTMLParser):
    """`text` is the visible text; `problems` are unbalanced tags, and anything that loads or runs something.

    The only script allowed is the package's; `data` is the JSON that it reads.
    """

    source: str
    text: str = ""
    ids: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    data: dict = field(default_factory=dict)
    cells: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self._open]
        self.problems += [f"id {name} is repeated" for name in {each for each in self.ids if self.ids.count(each) > 1}]

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in WITHOUT_END:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        if tag == "script":
            self._script, self._script_type = "", dict(attrs).get("type")
        if tag in ("link", "iframe", "object", "embed", "base", "form"):
            self.problems.append(f"<{tag}> is not allowed")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name.startswith("on"):
                self.problems.append(f"{tag} {name} runs a script")
            if name.split(":")[-1] in ("src", "href", "srcset", "data") and not value.startswith(("data:", "#")):
                self.problems.append(f"{tag} {name} loads {value}")
            self._check_style(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            if self._script_type == "application/json":
                self.data = json.loads(self._script)
            elif self._script != script():
                self.problems.append(f"a script that is not the package's: {self._script[:40]}")
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            self._check_style(data)
        elif "script" in self._open:
            self._script += data
        else:
            self.text += data
            if {"td", "th"} & set(self._open):
                self.cells[-1][-1] += data

    def row(self, name: str) -> list[str]:
        """The cells of the first table row with this name, without the name."""
        return next(cells[1:] for cells in self.cells if cells[0] == name)

    def _check_style(self, text: str) -> None:
        if "@import" in text or any(not part.startswith("#") for part in text.split("url(")[1:]):
            self.problems.append(f"a style loads something: {text[:40]}")
