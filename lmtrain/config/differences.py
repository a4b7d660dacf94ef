"""Differences between two plain trees (manifests, identities), as text."""

from typing import Any

from lmtrain.config.layers import dotted, walk_leaves


def describe_differences(before: Any, now: Any, before_name: str, now_name: str) -> list[str]:
    """One line for each leaf that differs: `tokenizer.vocab_size: the cache has 8192, this run has 50257`."""
    old, new = dict(walk_leaves(before)), dict(walk_leaves(now))
    lines = []
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) != new.get(path):
            lines.append(f"{dotted(path)}: {before_name} has {_short(old, path)}, {now_name} has {_short(new, path)}")
    return lines


def _short(leaves: dict[Any, Any], path: Any) -> str:
    text = repr(leaves[path]) if path in leaves else "nothing"
    return text if len(text) <= 80 else text[:77] + "..."
