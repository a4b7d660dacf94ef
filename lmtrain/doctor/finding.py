"""The result of one check."""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """`NOTE` is information and stops nothing; `BAD` would stop a run or make it wrong."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """`what` was checked, what was `seen`, and how to `fix` it if there is a problem."""

    what: str
    seen: str
    state: State = State.OK
    fix: str = ""

    def lines(self) -> list[str]:
        first = f"{self.state.value:<5}{self.what:<13}{self.seen}"
        return [first, *([f"{'':<18}-> {self.fix}"] if self.fix else [])]
