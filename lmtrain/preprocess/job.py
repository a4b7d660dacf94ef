"""What executors run in parallel: jobs that read one source each."""

from collections.abc import Callable
from typing import Any, Protocol

from lmtrain.preprocess.sources import AnySource

# Number of counts of a job: documents, tokens, bytes of input as stored.
COUNTS = 3
# Called with increments of the counts.
Report = Callable[[int, int, int], None]


class Job(Protocol):
    """A job that depends on nothing but its fields, so that any process of any machine may run it."""

    @property
    def source(self) -> AnySource:
        """What it reads."""

    def run(self, report: Report) -> Any:
        """Do the work, and return its result, which can be pickled."""

    def counts(self, result: Any) -> tuple[int, int, int]:
        """The counts of a finished job."""

    def check(self, result: Any) -> None:
        """Raise `UserError` if what the job has written on another machine is not here."""
