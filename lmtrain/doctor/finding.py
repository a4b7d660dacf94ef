"""The result of one check."""

from dataclasses import dataclass
from typing import Literal

from lmtrain.config.redact import redact


@dataclass(frozen=True)
class Finding:
    """`what` was checked, what was `seen`, and how to `fix` it.

    A `note` stops nothing; what is `BAD` would stop a run or make it wrong.
    """

    what: str
    seen: str
    state: Literal["ok", "note", "BAD"] = "ok"
    fix: str = ""

    def lines(self) -> list[str]:
        first = f"{self.state:<5}{self.what:<13}{self.seen}"
        return redact([first, *([f"{'':<18}-> {self.fix}"] if self.fix else [])])
