"""How documents become tokens: the recipe of a cache, and whether an existing cache matches it."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmtrain.config.tree import describe_differences
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import ChatFormat, CompletionFormat, PreferenceFormat, TextFormat, TokensFormat
from lmtrain.hf.chat_template import DEFAULT_TEMPLATE, ChatTemplate, find_template, read_templates
from lmtrain.hf.find_tokenizer import PASSTHROUGH, find_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import redact

# Number of the rules by which conversations and pairs become texts and targets. Caches of other rules have others.
_CHAT_RULES = 4


def recipe_of(
    config: DataConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    labelled: bool = False,
    split: str = "train",
) -> dict[str, Any]:
    """How documents become tokens: equal recipes give equal tokens. Has no secrets, and no setting without effect.

    `labelled`: rows of token ids have labels.
    """
    documents: dict[str, Any] = {"on_bad_record": config.on_bad_record}
    if config.text_documents != "line":  # caches built before this setting existed lack it
        documents["text_documents"] = config.text_documents
    if isinstance(config.format, TextFormat):
        documents |= {"text_key": config.text_key, "enforce_eos": config.enforce_eos}
    if isinstance(config.format, TokensFormat):
        described = config.format.model_dump(exclude={"too_long"})
        described["eos_id"] = tokenizer.eos_id if config.format.eos_id is None else config.format.eos_id
        documents["format" if labelled else "tokens"] = described
    elif not isinstance(config.format, ChatFormat):
        documents["enforce_bos"] = config.enforce_bos
    if isinstance(config.format, CompletionFormat):
        documents["format"] = config.format.model_dump(exclude={"too_long", "ignored_fields"})
    elif isinstance(config.format, PreferenceFormat):
        described = config.format.model_dump(exclude={"too_long", "chat_template", "ignored_fields"})
        documents["format"] = described | {"template": template and template.digest, "rules": _CHAT_RULES}
    elif isinstance(config.format, ChatFormat):
        assert template is not None
        described = config.format.model_dump(include={"type", "messages_field", "loss_on", "chat_template_kwargs"})
        documents["format"] = described | {"template": template.digest, "rules": _CHAT_RULES}
    if not isinstance(config.format, TextFormat | TokensFormat) and config.format.ignored_fields:
        documents["format"]["ignored_fields"] = config.format.ignored_fields
    if config.validation_fraction is not None:
        documents |= {"validation_fraction": config.validation_fraction, "split": split}
    return redact({"tokenizer": tokenizer.identity, "documents": documents})


def chat_template_of(config: DataConfig) -> ChatTemplate | None:
    """The template of conversations; None for other data. Raises `UserError` if there is none.

    Preferences need one only if they are conversations, which is found when they are read.
    """
    if not isinstance(config.format, ChatFormat | PreferenceFormat):
        return None
    if config.tokenizer == PASSTHROUGH:
        raise UserError("data.format: conversations are texts, but the tokenizer is passthrough")
    folder, wanted = find_tokenizer(config.tokenizer), config.format.chat_template
    if (
        isinstance(config.format, PreferenceFormat)
        and wanted is None
        and DEFAULT_TEMPLATE not in read_templates(folder)
    ):
        return None
    return find_template(folder, wanted, "data.format.chat_template")


def check_special_tokens(tokenizer: Tokenizer, config: DataConfig) -> None:
    """Raise `UserError` if a token to be enforced does not exist. Completions always end in the EOS token. Warn of
    tokens that transformers adds to texts and training does not."""
    if isinstance(config.format, ChatFormat | TokensFormat):
        return
    if isinstance(config.format, CompletionFormat | PreferenceFormat) and tokenizer.eos_id is None:
        raise UserError(
            f"tokenizer {tokenizer.path!r} has no eos_token in tokenizer_config.json, which ends completions and "
            "answers; set it there"
        )
    for name, is_enforced, number in (
        ("eos", config.enforce_eos, tokenizer.eos_id),
        ("bos", config.enforce_bos, tokenizer.bos_id),
    ):
        if is_enforced and number is None:
            advice = (
                f"{name}_token in tokenizer_config.json; set it there, or"
                if tokenizer.library
                else f"{name} token, since its documents are token ids;"
            )
            raise UserError(f"tokenizer {tokenizer.path!r} has no {advice} set data.enforce_{name}: false")
    _warn_of_added_tokens(tokenizer, config)


def _warn_of_added_tokens(tokenizer: Tokenizer, config: DataConfig) -> None:
    if tokenizer.library is None:
        return
    before, after = tokenizer.added_ids
    if before == [tokenizer.bos_id] and "enforce_bos" not in config.model_fields_set:
        _warn_once(
            f"tokenizer {tokenizer.path}: transformers starts each text with {tokenizer.library.id_to_token(before[0])}"
            ", and training documents get none: data.enforce_bos: true adds it, false keeps them as they are"
        )
    others = [number for number in (*before, *after) if number not in (tokenizer.bos_id, tokenizer.eos_id)]
    if others:
        names = ", ".join(str(tokenizer.library.id_to_token(number)) for number in others)
        _warn_once(f"tokenizer {tokenizer.path}: transformers adds {names} to each text; training documents lack it")


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning that applies to every split and source."""
    log.warning(message)


def token_dtype(vocab_size: int) -> np.dtype:
    """Dtype of stored token ids: two bytes if they suffice, else four; little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


_DIFFERENCES_SHOWN = 10

# A source as in a manifest, see `as_recorded`.
_Source = Mapping[str, Any]


def check_recipe(folder: str, cached: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise `UserError` if a cache was built with another tokenizer or other settings."""
    _refuse(folder, describe_differences(cached, wanted, "the cache", "this config"))


def check_sources(folder: str, cached: Mapping[Any, _Source], wanted: Mapping[Any, _Source], complete: bool) -> None:
    """Raise `UserError` if the sources of the shards of a cache, by name or index, are not those of the config.

    Their files may have moved to another folder, and may have another time (`is_touched`). A cache that is not
    `complete` may lack some.
    """
    same = (shard in wanted and _content(source) == _content(wanted[shard]) for shard, source in cached.items())
    if all(same) and (not complete or len(cached) == len(wanted)):
        return
    before, now = (dict.fromkeys(map(_name, sources.values())) for sources in (cached, wanted))
    changed = [_name(s) for s in cached.values() if not any(_agree(s, other) for other in wanted.values())]
    lines = [f"{name} is in the cache, but no source of this config" for name in before if name not in now]
    lines += [f"{name} has changed since it was cached" for name in changed if name in now]
    if complete:
        lines += [f"{name} is a source of this config, but not in the cache" for name in now if name not in before]
    _refuse(folder, lines or ["the list of sources has another order or length"])


def is_touched(cached: _Source, now: _Source) -> bool:
    """Whether two records of the same source differ only in the time of the file."""
    return cached["url"] == now["url"] and cached.get("modified") != now.get("modified")


def _content(source: _Source) -> dict[str, Any]:
    """A source without its folder and time, which is equal for a file and a copy of it in another folder."""
    return {**source, "modified": None, "url": os.path.basename(source["url"])}


def _agree(cached: _Source, wanted: _Source) -> bool:
    """Whether all is equal that is known of both."""
    return all(cached[name] == wanted[name] for name in cached.keys() & wanted.keys())


def _name(source: _Source) -> str:
    start = source.get("start")
    return source["url"] if start is None else f"{source['url']} from byte {start:,}"


def _refuse(folder: str, differences: list[str]) -> None:
    if differences:
        more = len(differences) - _DIFFERENCES_SHOWN
        shown = differences[:_DIFFERENCES_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        report = "\n".join(f"  {line}" for line in shown)
        raise OtherCacheError(folder, f"{folder}: the cache does not match this config\n{report}")


class OtherCacheError(UserError):
    """The cache in `folder` has other data than this config, as `problem` says."""

    ADVICE = "  choose another data.cache_dir, or build it again with `lmtrain preprocess CONFIG --rebuild`"

    def __init__(self, folder: str, problem: str):
        super().__init__(f"{problem}\n{self.ADVICE}")
        self.folder = folder
        self.problem = problem


@dataclass(frozen=True)
class Dropped:
    """Documents of one split of a source to leave out. `recipe` says why, and is part of the cache's recipe;
    `documents`: which ones, by the number of the shard, bool [documents]."""

    recipe: dict[str, Any]
    documents: Mapping[int, np.ndarray] = field(default_factory=dict)
