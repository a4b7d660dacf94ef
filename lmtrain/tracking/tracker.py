"""The interface of trackers: six methods. Each backend is one file; `background.py` isolates its failures."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    """Receives the reports of a run. Methods may be slow or raise: the caller isolates them."""

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        """The resolved config, once, at the start."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics after `step` updates; steps never decrease."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Facts about the entire run, such as its number of parameters."""

    def artifact(self, path: str, name: str, kind: str) -> None:
        """A file or folder of the run to store, such as its code (`kind` code) or a profile."""

    def text(self, texts: Mapping[str, str], step: int) -> None:
        """Texts that the model generated after `step` updates, by their prompts. Custom trackers may omit this."""

    def finish(self) -> None:
        """Flush and close."""
