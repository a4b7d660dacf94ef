"""Files of a run in its log folder: its log, its resolved config, its tokenizer; and the tokenizer, chat template and
generation settings of a run, which are its config's or these copies."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lmtrain.config.describe import show
from lmtrain.data.formats import ChatFormat, PreferenceFormat
from lmtrain.hf.chat_template import ChatTemplate, find_template, read_templates, tokenizer_contents
from lmtrain.hf.find_tokenizer import PASSTHROUGH, open_tokenizer
from lmtrain.hf.tokenizer import TOKENIZER_FILES, Tokenizer, to_json
from lmtrain.hf.weight_files import read_model_json
from lmtrain.run.config import resolved
from lmtrain.run.run import Run
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import Processes, log, start_file_log
from lmtrain.runtime.storage import remove_temporaries, write_atomically
from lmtrain.weights.export_folder import MODEL_CONFIG, marks_of
from lmtrain.weights.hf_config import hf_ref

GENERATION_CONFIG = "generation_config.json"
# Settings of generation that older models have in their config.json.
_IN_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id")
# Settings of generation whose values are token ids.
_TOKEN_IDS = {
    *_IN_CONFIG,
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "sequence_bias"),
}


def kept_tokenizer(run: Run) -> str:
    """The folder with the run's copy of its tokenizer."""
    return os.path.join(run.logs, "tokenizer")


def tokenizer_of(run: Run, identity: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint with this identity: the config's, or the run's copy if the config's differs.

    If the copy differs too, the config's is returned. Raises `UserError` if there is no tokenizer at all.
    """
    data, kept = run.config.data, kept_tokenizer(run)
    tokenizer, problem = None, f"{data.tokenizer} has changed"
    try:
        tokenizer = open_tokenizer(data.tokenizer, data.vocab_size)
    except UserError as error:
        if not os.path.isdir(kept):
            raise
        problem = str(error)
    if (tokenizer is None or tokenizer.identity != identity) and data.tokenizer != PASSTHROUGH and os.path.isdir(kept):
        copy = open_tokenizer(kept)
        if copy.identity == identity:
            log.warning(f"data.tokenizer: {problem}; using the copy in {kept}")
            return copy
    if tokenizer is None:
        raise UserError(problem)
    return tokenizer


def template_of(run: Run, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of the run's conversations, for exports and chats; None: the tokenizer's own.

    Of several, that of the first source. If a file is gone, that of the run's copy of the tokenizer.
    """
    templates: dict[str, ChatTemplate] = {}
    for name, source in run.config.data.sources().items():
        if not isinstance(source.format, ChatFormat | PreferenceFormat) or tokenizer.library is None:
            continue
        setting = f"data.configs.{name}.format.chat_template" if name else "data.format.chat_template"
        try:
            template = find_template(tokenizer.path, source.format.chat_template, setting)
        except UserError:
            if not read_templates(kept_tokenizer(run)):
                continue
            template = find_template(kept_tokenizer(run), None, setting)
        templates.setdefault(template.text, template)
    if len(templates) > 1:
        log.warning("data.configs: the sources have several chat templates; exports and chats have that of the first")
    return next(iter(templates.values()), None)


def generation_of(run: Run) -> dict[str, Any]:
    """Settings of generation of the run's initial model, for exports; from the run's copy if the model is gone.

    Without those that name token ids if the run may have another tokenizer than the model. Empty without a model.
    """
    ref, kept = hf_ref(run.config), kept_tokenizer(run)
    if ref is None:
        return {}
    try:
        values, config = read_model_json(ref, GENERATION_CONFIG), read_model_json(ref, MODEL_CONFIG) or {}
        if values is not None and marks_of(None).keys() & config.keys():
            values.pop("max_length", None)  # an export says again where the positions end
        if values is None:
            values = {name: config[name] for name in _IN_CONFIG if config.get(name) is not None}
    except UserError as error:
        values = read_model_json(kept, GENERATION_CONFIG) if os.path.isdir(kept) else None
        if values is None:
            log.warning(f"{GENERATION_CONFIG} of an export will lack the settings of initialize_from_hf: {error}")
            return {}
    dropped = _TOKEN_IDS if run.config.allow_other_tokenizer else set()
    return {
        name: value
        for name, value in values.items()
        if not name.startswith("_") and name != "transformers_version" and name not in dropped
    }


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
