"""What a look at one thing gave."""

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """`NOTE` is worth knowing and stops nothing; `BAD` would stop a run, or spoil it."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True)
class Finding:
    """`what` was looked at, what was `seen`, and how to `mend` it if that is not well."""

    what: str
    seen: str
    state: State = State.OK
    mend: str = ""

    def lines(self) -> list[str]:
        first = f"{self.state.value:<5}{self.what:<13}{self.seen}"
        return [first, *([f"{'':<18}-> {self.mend}"] if self.mend else [])]
