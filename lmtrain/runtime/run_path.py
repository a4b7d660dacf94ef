"""Paths of a run's folders."""

import os


def fill_run_id(path: str, run: str) -> str:
    """`path` with `~` and a literal ${run_id} replaced."""
    return os.path.expanduser(path).replace("${run_id}", run)


def run_path(base: str, run: str) -> str:
    """`<base>/<run_id>`; a literal ${run_id} in `base` is replaced instead, and nothing is appended."""
    filled = fill_run_id(base, run)
    return filled if "${run_id}" in base else f"{filled.rstrip('/')}/{run}"
