"""The tokenizer and the chat template of a run: its config's, or the copies in its log folder if those are gone."""

import os
from collections.abc import Mapping
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.data.formats import ChatFormat, PreferenceFormat
from lmtrain.hf.chat_template import ChatTemplate, find_template, read_templates
from lmtrain.hf.find_tokenizer import PASSTHROUGH, open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.run.run import Run
from lmtrain.runtime.logging import log


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
