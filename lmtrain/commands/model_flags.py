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
    if hf:
        parser.add_argument(
            "--hf", metavar="REF", help="Hugging Face model instead of a checkpoint: folder, URL, or id[@revision]"
        )


def check_model_flags(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for two models."""
    if arguments.hf is not None and arguments.checkpoint is not None:
        raise UserError("--hf and --checkpoint: choose one")
