"""TensorBoard event files, by tensorboardX."""

import os
from collections.abc import Mapping
from typing import Any

import yaml

# Maximum seconds of metrics that a killed run loses, also of those before its last checkpoint.
_FLUSH_SECONDS = 10


class TensorboardTracker:
    """Writes to `logdir`. After a restart at `step`, TensorBoard drops what was logged for later steps."""

    def __init__(self, logdir: str, step: int):
        from tensorboardX import SummaryWriter  # slow to import; only the tracker's thread waits for it

        # event files are named by second and host: two starts within one second would share a file
        suffix = f".{os.getpid()}"
        purge_step = step + 1 if step else None
        self._writer = SummaryWriter(logdir, purge_step=purge_step, filename_suffix=suffix, flush_secs=_FLUSH_SECONDS)

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        self._writer.add_text("config", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=False)}```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._writer.add_text(name, str(value))

    def artifact(self, path: str, name: str, kind: str) -> None:
        self._writer.add_text(f"{kind}/{name}", path)  # event files cannot store files, so the path is logged

    def text(self, texts: Mapping[str, str], step: int) -> None:
        for prompt, text in texts.items():
            indented = f"{prompt}{text}".replace("\n", "\n    ")
            self._writer.add_text(f"samples/{prompt}", f"    {indented}", step)  # Markdown: as it is, not formatted

    def finish(self) -> None:
        self._writer.close()
