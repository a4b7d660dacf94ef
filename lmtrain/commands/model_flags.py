"""Flags of commands that use a trained model: `--run`, `--checkpoint` and `--hf` name it."""

import argparse

from lmtrain.commands.arguments import Parser
from lmtrain.config.errors import UserError


def add_model_flags(parser: Parser, hf: bool = True) -> None:
    """Add the flags that name a model: a checkpoint of a run or, with `hf`, a Hugging Face model."""
    parser.add_argument(
        "--run",
        metavar="ID",
        help="run id, or the folder of its logs; replaces CONFIG with the config that the run was started with, except "
        "for secrets, which are not saved: where they are needed, add CONFIG",
    )
    parser.add_argument(
        "--checkpoint",
        "--checkpoint_path",
        metavar="PATH",
        help="checkpoint to load: step folder, run folder or a parent of it (default: the config's own run)",
    )
    parser.add_argument(
        "--average",
        metavar="N|A,B,...",
        help="average of the last N permanent checkpoints, or of a list of steps or checkpoints",
    )
    if hf:
        parser.add_argument(
            "--hf", metavar="REF", help="Hugging Face model instead of a checkpoint: folder, URL, or id[@revision]"
        )


def check_model_flags(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for two models."""
    if arguments.hf is None:
        return
    for flag in ("checkpoint", "average"):
        if getattr(arguments, flag) is not None:
            raise UserError(f"--hf and --{flag}: choose one")
