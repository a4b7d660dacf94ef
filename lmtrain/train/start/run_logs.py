"""Files of a run in its log folder: its log, its resolved config and its tokenizer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lmtrain.config.errors import UserError
from lmtrain.config.show import show
from lmtrain.hf.chat_template import tokenizer_contents
from lmtrain.hf.tokenizer import TOKENIZER_FILES, Tokenizer, to_json
from lmtrain.run.config import resolved
from lmtrain.run.run import Run
from lmtrain.runtime.atomic_files import remove_temporaries, write_atomically
from lmtrain.runtime.logging import start_file_log
from lmtrain.runtime.processes import Processes
from lmtrain.weights.run_tokenizer import GENERATION_CONFIG, generation_of, kept_tokenizer, template_of


def open_log(run: Run, processes: Processes) -> None:
    """Open the log file of this process. Raises `UserError` if it cannot be written."""
    with _naming_the_setting(run):
        start_file_log(os.path.dirname(run.logs), run.id, processes)


def keep_config(run: Run) -> None:
    """Write `config.yaml`, each value with its origin. Raises `UserError` if it cannot be written."""
    with _naming_the_setting(run):
        os.makedirs(run.logs, exist_ok=True)
        remove_temporaries(run.logs)
        text = show(resolved(run.config), run.loaded.tree)
        write_atomically(os.path.join(run.logs, "config.yaml"), text.encode())


def keep_tokenizer(run: Run, tokenizer: Tokenizer) -> None:
    """Copy the tokenizer's files with the run's chat template, and the initial model's settings of generation, so that
    the run no longer depends on the originals."""
    if tokenizer.library is None:
        return
    source, folder = os.path.expanduser(tokenizer.path), kept_tokenizer(run)
    with _naming_the_setting(run):
        os.makedirs(folder, exist_ok=True)
        remove_temporaries(folder)
        contents = tokenizer_contents(source, template_of(run, tokenizer))
        if generation := generation_of(run):
            contents[GENERATION_CONFIG] = to_json(generation)
        for name in (GENERATION_CONFIG, *reversed(TOKENIZER_FILES)):  # tokenizer.json last: its presence means complete
            if name in contents:
                write_atomically(os.path.join(folder, name), contents[name])


@contextmanager
def _naming_the_setting(run: Run) -> Iterator[None]:
    """Convert file system errors into errors that name the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"trainer.log_dir: {run.config.trainer.log_dir} cannot be created: {error.strerror}") from None
