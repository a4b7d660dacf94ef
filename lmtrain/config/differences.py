"""Differences between two plain trees (manifests, identities), as text."""

from collections.abc import Callable
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.redact import redact, redact_as_before
from lmtrain.config.tree import Path, dotted, walk_leaves

# The text of a value that a tree omits: by the tree, and the path of the value.
Omitted = Callable[[Any, Path], str]


def describe_differences(
    before: Any, now: Any, before_name: str, now_name: str, omitted: Omitted = lambda tree, path: "nothing"
) -> list[str]:
    """One line for each leaf that differs: `tokenizer.vocab_size: the cache has 8192, this run has 50257`.

    Secrets are not compared. `before` may be of an earlier version, which masked fewer values and more of URLs.
    """
    old, new = dict(walk_leaves(redact(before))), dict(walk_leaves(redact(now)))
    lines = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) not in (new.get(path), redact_as_before(new.get(path))):
            sides = ((old, before), (new, now))
            texts = [_short(repr(leaves[path]) if path in leaves else omitted(tree, path)) for leaves, tree in sides]
            lines.append(f"{dotted(path)}: {before_name} has {texts[0]}, {now_name} has {texts[1]}")
    return lines


def require_equal(
    saved: Any, now: Any, problem: str, advice: str = "", omitted: Omitted = lambda tree, path: "nothing"
) -> None:
    """Raise `UserError` with the `problem`, each difference of a checkpoint from this config, and advice, if any."""
    lines = describe_differences(saved, now, "the checkpoint", "this config", omitted)
    if lines:
        raise UserError("\n  ".join([problem, *lines, *([advice] if advice else [])]))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
