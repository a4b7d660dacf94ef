"""Models from Hugging Face in a run: sizes and tokenizer from `initialize_from_hf`, and checks that both agree."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from lmtrain.checkpoint.discovery import find_checkpoints, list_checkpoints
from lmtrain.checkpoint.manifest import DamagedError
from lmtrain.commands.arguments import Run
from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import PASSTHROUGH, open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer, load_tokenizer
from lmtrain.hf.weights import locate, read_model_config
from lmtrain.models.base_config import FREE
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import is_url

# The share of ids that may be those of other tokens.
_FEW = 0.01


def resolve_hf(run: Run, checkpoint: str | None = None, check_tokenizer: bool = True) -> Run:
    """The run with what its config leaves to `initialize_from_hf` filled in: the model's sizes, the tokenizer.

    A run that has begun knows both from its checkpoints (or the one at `checkpoint`), and needs the model no more.
    Raises `UserError` if the config and the model's own contradict one another. Nothing is read without
    `initialize_from_hf`.
    """
    config = run.config
    ref = hf_ref(config)
    if ref is None:
        return run
    values = config.model_dump()
    saved = _saved_config(run, checkpoint)
    if saved is not None and saved["initialize_from_hf"] == config.initialize_from_hf:
        if config.use_hf_model_config:
            values["model"] = saved["model"] | {name: values["model"][name] for name in _free_given(config)}
        if "tokenizer" not in config.data.model_fields_set:
            values["data"]["tokenizer"] = saved["data"]["tokenizer"]
        return replace(run, loaded=replace(run.loaded, config=_validate(values, ref)))
    if config.use_hf_model_config:
        values["model"] = _model_of(ref, config)
        model = values["model"]
        log.info(f"{ref}: {model['type']}, {model['num_layers']} layers of {model['hidden_dim']}")
    else:
        _check_agrees(ref, config)
    if "tokenizer" not in config.data.model_fields_set:
        values["data"]["tokenizer"] = ref
        log.info(f"data.tokenizer is not set: that of {ref}")
    elif check_tokenizer and not config.allow_other_tokenizer:
        check_tokens(ref, config.data)
    resolved = _validate(values, ref)
    return replace(run, loaded=replace(run.loaded, config=resolved))


def _saved_config(run: Run, checkpoint: str | None) -> dict[str, Any] | None:
    """The whole config that the newest checkpoint was saved with; None if there is none."""
    if checkpoint is not None:
        found = find_checkpoints(checkpoint)
    else:
        found = list_checkpoints(run.config.trainer.checkpointer.run_folder(run.id))
    for newest in reversed(found):
        with suppress(DamagedError):  # a damaged one is told when its arrays are to be used
            config: dict[str, Any] = newest.read_run_info()["config"]
            return config
    return None


def _free_given(config: RunConfig) -> set[str]:
    """Settings of the model that were written and leave the weights' meaning alone."""
    return config.model.model_fields_set & FREE if "model" in config.model_fields_set else set()


def hf_ref(config: RunConfig) -> str | None:
    """The model to begin from, None if the config names none."""
    if config.initialize_from_hf is not True:
        return config.initialize_from_hf or None
    from lmtrain.models.registry import hf_family

    default: str = hf_family(config.model.type).DEFAULT_REF
    return default


def config_of(ref: str) -> RunConfig:
    """The config of a model alone: its sizes and its tokenizer, all else by default."""
    settings = hf_settings(ref)
    tokenizer = {"tokenizer": ref} if has_tokenizer(ref) else {}
    return _validate({"model": settings, "data": tokenizer}, ref)


def has_tokenizer(ref: str) -> bool:
    """Whether the model comes with its tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    return any(locate(ref, name) is not None for name in names)


def check_tokens(ref: str, data: DataConfig) -> None:
    """Raise `UserError` if `data.tokenizer` gives ids to other tokens than the model was trained on.

    One may have more tokens than the other, and a few may have other names, as special tokens often do.
    """
    if data.tokenizer == PASSTHROUGH or not has_tokenizer(ref):
        return
    ours, theirs = _tokens_of(open_tokenizer(data.tokenizer)), _tokens_of(_their_tokenizer(ref))
    shared = ours.keys() & theirs.keys()
    differ = sum(ours[number] != theirs[number] for number in shared)
    if differ > _FEW * len(shared):
        raise UserError(
            f"data.tokenizer: {data.tokenizer} gives {differ:,} of {len(shared):,} ids to other tokens than {ref} was "
            f"trained on, so that its embeddings would mean nothing; set data.tokenizer: {ref} and a cache_dir for it, "
            "or allow_other_tokenizer: true"
        )


def _their_tokenizer(ref: str) -> Tokenizer:
    """The model's own, of which the vocabulary is wanted alone: without transformers where it has a tokenizer.json."""
    path = locate(ref, "tokenizer.json")
    if path is None or is_url(path):
        return open_tokenizer(ref)
    return load_tokenizer(os.path.dirname(path))


def _tokens_of(tokenizer: Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.backend.get_vocab().items()}


def hf_settings(ref: str) -> dict[str, Any]:
    """The `model` section that the model's `config.json` stands for."""
    from lmtrain.models.registry import family_of

    values = read_model_config(ref)
    if values.get("quantization_config"):
        raise UserError(f"{ref}: its weights are quantized (quantization_config); take the model they were made from")
    try:
        settings: dict[str, Any] = family_of(values).from_hf_config(values)
    except UserError as error:
        raise UserError(f"{ref}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise UserError(f"{ref}: config.json: a value is not of the kind it should be: {error}") from None
    return settings


def _model_of(ref: str, config: RunConfig) -> dict[str, Any]:
    """Their settings, with those of ours that are free. Raises `UserError` for others that are set."""
    settings, ours = hf_settings(ref), config.model
    given = ours.model_fields_set if "model" in config.model_fields_set else set()
    if "type" in given and ours.type != settings["type"]:
        raise UserError(f"model.type: {ours.type}, but {ref} is of type {settings['type']}")
    excess = sorted(given - FREE - {"type"})
    if excess:
        raise UserError(f"model.{excess[0]}: comes from {ref} with use_hf_model_config; remove one of them")
    _check_length(ref, ours.seq_len if "seq_len" in given else settings["seq_len"], settings)
    return settings | {name: getattr(ours, name) for name in given}


def _check_agrees(ref: str, config: RunConfig) -> None:
    """Raise `UserError` if a setting that gives the weights their meaning differs from the model's own."""
    settings = hf_settings(ref)
    theirs, ours = _validate({"model": settings}, ref).model.meaning(), config.model.meaning()
    differ = {name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}
    if settings["type"] in ("gpt2", "backpack") and not ours.get("use_bias"):
        differ.discard("use_bias")  # their format has biases always; loading demands that they are zero
    if differ:
        lines = [f"  model.{name}: {ours.get(name)} here, {theirs.get(name)} there" for name in sorted(differ)]
        report = "\n".join(lines)
        raise UserError(
            f"{ref} is another model than this config's\n{report}\n  set use_hf_model_config: true to take its own"
        )
    _check_length(ref, config.model.seq_len, settings)


def _check_length(ref: str, seq_len: int, settings: Mapping[str, Any]) -> None:
    """A learned position has no meaning beyond the last one that was learned."""
    if settings["type"] in ("gpt2", "backpack") and seq_len > settings["seq_len"]:
        raise UserError(f"model.seq_len: {seq_len}, but {ref} has learned {settings['seq_len']} positions only")


def _validate(values: Mapping[str, Any], ref: str) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        # after `model` comes the kind, which is no part of the setting's name
        where = ".".join(
            str(part) for index, part in enumerate(first["loc"]) if (index, first["loc"][0]) != (1, "model")
        )
        raise UserError(f"{ref}: its config.json gives {where}: {first['msg']}") from None
