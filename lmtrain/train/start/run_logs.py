"""Files of a run in its log folder: its log, its resolved config and its tokenizer."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.show import show
from lmtrain.hf.chat_template import tokenizer_contents
from lmtrain.hf.find_tokenizer import PASSTHROUGH, open_tokenizer
from lmtrain.hf.tokenizer import TOKENIZER_FILES, Tokenizer
from lmtrain.run.config import resolved
from lmtrain.run.run import Run
from lmtrain.runtime.atomic_files import remove_temporaries, write_atomically
from lmtrain.runtime.logging import log, start_file_log
from lmtrain.runtime.processes import Processes


def open_log(run: Run, processes: Processes) -> None:
    """Open the log file of this process. Raises `UserError` if it cannot be written."""
    with _naming_the_setting(run):
        start_file_log(os.path.dirname(run.logs), run.id, processes)


def keep_config(run: Run) -> None:
    """Write `config.yaml`, each value with its origin. Raises `UserError` if it cannot be written."""
    with _naming_the_setting(run):
        os.makedirs(run.logs, exist_ok=True)
        remove_temporaries(run.logs)
        text = show(resolved(run.config), run.loaded.layer)
        write_atomically(os.path.join(run.logs, "config.yaml"), text.encode())


def keep_tokenizer(run: Run, tokenizer: Tokenizer) -> None:
    """Copy the tokenizer's files, so that the run no longer depends on those that its config names."""
    if tokenizer.library is None:
        return
    source, folder = os.path.expanduser(tokenizer.path), os.path.join(run.logs, "tokenizer")
    with _naming_the_setting(run):
        os.makedirs(folder, exist_ok=True)
        contents = tokenizer_contents(source)
        for name in reversed(TOKENIZER_FILES):  # tokenizer.json last: its presence means complete
            if name in contents:
                write_atomically(os.path.join(folder, name), contents[name])


def tokenizer_of(run: Run, identity: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint with this identity: the config's, or the run's copy if the config's differs.

    If the copy differs too, the config's is returned. Raises `UserError` if there is no tokenizer at all.
    """
    data = run.config.data
    kept = os.path.join(run.logs, "tokenizer")
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
            log.warning(f"data.tokenizer: {problem or f'{data.tokenizer} has changed'}; using the copy in {kept}")
            return copy
    if problem:
        raise UserError(problem)
    return found


@contextmanager
def _naming_the_setting(run: Run) -> Iterator[None]:
    """Convert file system errors into errors that name the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"trainer.log_dir: {run.config.trainer.log_dir} cannot be created: {error.strerror}") from None
