"""Index of this process in a run, and number of processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Processes:
    """Index of this process among `count` processes. `coordinator`: host:port of process 0, if there are several."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes files that exist once per run."""
        return self.index == 0


# A run of one process.
ALONE = Processes()
