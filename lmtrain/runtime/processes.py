"""Which of a run's processes this one is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Processes:
    """This process's number among `count`; `coordinator` is the host:port of process 0, if there are several."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes what there is one of."""
        return self.index == 0


# A run of one process.
ALONE = Processes()
