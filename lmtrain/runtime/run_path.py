"""Where a run keeps its things."""

import os


def run_path(base: str, run: str) -> str:
    """`<base>/<run id>`; a literal ${run_id} in `base` is replaced instead, and nothing is appended."""
    base = os.path.expanduser(base)
    return base.replace("${run_id}", run) if "${run_id}" in base else f"{base.rstrip('/')}/{run}"
