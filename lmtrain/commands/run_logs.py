"""The folder of a run's logs, which also keeps what the run is: its resolved config and its tokenizer."""

import os
from collections.abc import Mapping
from typing import Any

from lmtrain.commands.arguments import Run
from lmtrain.config.errors import UserError
from lmtrain.hf.find_tokenizer import PASSTHROUGH, open_tokenizer
from lmtrain.hf.tokenizer import TOKENIZER_FILES, Tokenizer
from lmtrain.runtime.files import write_atomically
from lmtrain.runtime.logging import log
from lmtrain.runtime.run_path import fill_run_id


def run_logs(run: Run) -> str:
    """The run's own folder among the logs."""
    return os.path.join(fill_run_id(run.config.trainer.log_dir, run.id), run.id)


def keep_tokenizer(run: Run, tokenizer: Tokenizer) -> None:
    """Copy the tokenizer's files, so that the run does not need those that its config names any more."""
    if tokenizer.library is None:
        return
    source, folder = os.path.expanduser(tokenizer.path), os.path.join(run_logs(run), "tokenizer")
    os.makedirs(folder, exist_ok=True)
    for name in reversed(TOKENIZER_FILES):  # tokenizer.json last: its presence means complete
        path = os.path.join(source, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                write_atomically(os.path.join(folder, name), file.read())


def tokenizer_of(run: Run, identity: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint that was saved with this identity: the config's, or the run's copy of its own.

    The config's where the copy does not help; then the two differ. Raises `UserError` if there is none at all.
    """
    data = run.config.data
    kept = os.path.join(run_logs(run), "tokenizer")
    problem = ""
    try:
        found = open_tokenizer(data.tokenizer, data.vocab_size)
        if found.identity == identity:
            return found
    except UserError as error:
        if not os.path.isdir(kept):
            raise
        problem = str(error)
    if data.tokenizer != PASSTHROUGH and os.path.isdir(kept):
        copy = open_tokenizer(kept)
        if copy.identity == identity:
            log.warning(
                f"data.tokenizer: {problem or f'{data.tokenizer} is another one now'}; using the copy in {kept}"
            )
            return copy
    if problem:
        raise UserError(problem)
    return found
