"""Differences between two plain trees (manifests, identities), as text."""

from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.redact import redact, redact_as_before
from lmtrain.config.tree import dotted, walk_leaves


def describe_differences(before: Any, now: Any, before_name: str, now_name: str) -> list[str]:
    """One line for each leaf that differs: `tokenizer.vocab_size: the cache has 8192, this run has 50257`.

    Secrets are not compared. `before` may be of an earlier version, which masked fewer values and more of URLs.
    """
    old, new = dict(walk_leaves(redact(before))), dict(walk_leaves(redact(now)))
    lines = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) not in (new.get(path), redact_as_before(new.get(path))):
            lines.append(f"{dotted(path)}: {before_name} has {_short(old, path)}, {now_name} has {_short(new, path)}")
    return lines


def require_equal(saved: Any, now: Any, problem: str, advice: str = "") -> None:
    """Raise `UserError` with the `problem`, each difference of a checkpoint from this config, and advice, if any."""
    lines = describe_differences(saved, now, "the checkpoint", "this config")
    if lines:
        raise UserError("\n  ".join([problem, *lines, *([advice] if advice else [])]))


def _short(leaves: dict[Any, Any], path: Any) -> str:
    text = repr(leaves[path]) if path in leaves else "nothing"
    return text if len(text) <= 80 else text[:77] + "..."
