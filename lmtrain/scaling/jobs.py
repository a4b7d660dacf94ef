"""The runs of a ladder as commands for other machines: for a shell, or as arrays of Slurm jobs."""

import os
import shlex
from collections.abc import Sequence

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.runtime.atomic_files import write_atomically
from lmtrain.scaling.arguments import as_command

_MORE = "# Run `lmtrain scaling run` again when these are done: the other runs use the best of these learning rates."


def shell_lines(stages: Sequence[Sequence[Sequence[str]]], more: bool) -> list[str]:
    """The commands of all stages, each with a comment before it; `more` if others follow that are not known yet."""
    lines = []
    for number, stage in enumerate(stages):
        lines.append(f"# {'These runs need no others.' if number == 0 else 'These need the runs above.'}")
        lines += [as_command(arguments) for arguments in stage]
    return lines + ([_MORE] if more else [])


def write_arrays(folder: str, name: str, stages: Sequence[Sequence[Sequence[str]]], more: bool) -> str:
    """Write a file of commands for each stage, and a script that submits them as arrays. -> its path

    A stage starts when all runs of the stage before it have ended well. Raises `UserError` if writing fails.
    """
    lines = ["#!/usr/bin/env bash", f"# Submits the runs of {name}; arguments are options of sbatch."]
    if more:
        lines.append(_MORE)
    lines += ["set -euo pipefail", 'after=""']
    try:
        os.makedirs(folder, exist_ok=True)
        for old in os.listdir(folder):
            if old.endswith(".commands"):
                os.remove(os.path.join(folder, old))
        for number, stage in enumerate(stages, 1):
            path = os.path.join(folder, f"{number}.commands")
            write_atomically(path, "".join(f"{shlex.join(arguments)}\n" for arguments in stage).encode())
            lines.append(
                f'after=$(sbatch --parsable "$@" ${{after:+"--dependency=afterok:${{after%%;*}}"}} '
                f'--array=1-{len(stage)} "${{REPOSITORY:-.}}/deploy/slurm/array.sbatch" {shlex.quote(path)})'
            )
            lines.append(f'echo "array $after: {counted(len(stage), "run")}"')
        script = os.path.join(folder, "submit.sh")
        write_atomically(script, ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise UserError(f"--slurm {folder} cannot be written: {error.strerror or error}") from None
    return script
