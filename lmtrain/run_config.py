"""`RunConfig` under its public name, for programs that train from Python."""

from lmtrain.run.config import RunConfig

__all__ = ["RunConfig"]
