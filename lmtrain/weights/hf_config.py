"""Models from Hugging Face in a run: sizes and tokenizer from `initialize_from_hf`, and checks that they match."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lmtrain.checkpoint.discovery import find_checkpoints, list_checkpoints
from lmtrain.checkpoint.manifest import DamagedError
from lmtrain.config.section import Role, settings_of
from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import PASSTHROUGH, open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer, load_tokenizer
from lmtrain.hf.weight_files import locate, read_model_config
from lmtrain.models.base_config import MAX_LAYERS, RopeConfig
from lmtrain.models.registry import family_of, hf_family
from lmtrain.objectives.config import DistillConfig
from lmtrain.run.config import RunConfig
from lmtrain.run.run import ResolvedSettings, Run, resolve, validate
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import find_masked, redact
from lmtrain.runtime.storage import is_url
from lmtrain.weights.lora_base import base_dtype

# Settings of RoPE that another scaling keeps.
_KEPT = ("theta", "local_theta", "partial_rotary_factor")

# Maximum share of ids that may belong to other tokens.
_MAX_DIFFERENT = 0.01


def resolve_hf(run: Run, checkpoint: str | None = None, check_tokenizer: bool = True) -> Run:
    """The run with the settings that its config leaves to its initial model: sizes, tokenizer, dtype of a LoRA base.

    A run that has checkpoints reads both from the newest one (or the one at `checkpoint`), not from the model. Raises
    `UserError` if the config contradicts the model's own config. Nothing is read without an initial model.
    """
    ref = hf_ref(run.config)
    if ref is not None and not run.is_named:  # a run's own config is complete
        run = resolve(run, _in_checkpoint(run, ref, checkpoint) or _in_model(ref, run.config, check_tokenizer))
    lora = run.config.lora
    if lora is not None and lora.base_dtype is None:
        dtype = {"lora": {"base_dtype": base_dtype(run.config, ref)}}
        run = resolve(run, ResolvedSettings("the base model", dtype))
    return run


def _in_checkpoint(run: Run, ref: str, path: str | None) -> ResolvedSettings | None:
    """Settings of the newest checkpoint; None if there is none, or if that run started from another model."""
    config = run.config
    checkpoints = find_checkpoints(path) if path is not None else list_checkpoints(run.checkpoints)
    for newest in reversed(checkpoints):
        with suppress(DamagedError):  # a corrupt checkpoint is reported when its arrays are read
            saved = redact(newest.read_run_info()["config"])
            if saved["initialize_from_hf"] != redact(config.initialize_from_hf):
                return None
            settings: dict[str, Any] = {}
            if config.use_hf_model_config:
                settings["model"] = _with_written(saved["model"], config, newest.path)
            if not _names_tokenizer(config):
                settings["data"] = {"tokenizer": _saved_tokenizer(saved, ref, newest.path)}
            return ResolvedSettings(newest.path, settings)
    return None


def _saved_tokenizer(saved: Mapping[str, Any], ref: str, path: str) -> str:
    """The tokenizer of a saved config, which has no secrets. Raises `UserError` if it needs one that `ref` lacks."""
    tokenizer: str = saved["data"]["tokenizer"]
    if tokenizer == redact(ref):
        return ref
    if find_masked(tokenizer):
        raise UserError(f"data.tokenizer: {path} has {tokenizer}, with its secrets masked; set data.tokenizer")
    return tokenizer


def _in_model(ref: str, config: RunConfig, check_tokenizer: bool) -> ResolvedSettings:
    settings: dict[str, Any] = {}
    if config.use_hf_model_config:
        theirs = hf_settings(ref)
        model = settings["model"] = _with_written(theirs, config, ref)
        _check_length(ref, model["seq_len"], theirs)
        log.info(f"{ref}: {model['type']}, {model['num_layers']} layers of {model['hidden_dim']}")
    else:
        _check_agrees(ref, config)
    if not _names_tokenizer(config):
        settings["data"] = {"tokenizer": ref}
        log.info(f"data.tokenizer is not set: using the tokenizer of {ref}")
    elif check_tokenizer and not config.allow_other_tokenizer:
        check_tokens(ref, config.data)
    return ResolvedSettings(f"{ref}: its config.json", settings)


def _names_tokenizer(config: RunConfig) -> bool:
    return "tokenizer" in config.data.model_fields_set


def _with_written(theirs: Mapping[str, Any], config: RunConfig, source: str) -> dict[str, Any]:
    """Their `model` section with our values of other settings than the architecture, in `moe` too, and our scaling of
    RoPE.

    Raises `UserError` if the config sets another part of the architecture.
    """
    ours = config.model
    given = ours.model_fields_set if "model" in config.model_fields_set else set()
    if "type" in given and ours.type != theirs["type"]:
        raise UserError(f"model.type: {ours.type}, but {source} is of type {theirs['type']}")
    excess = sorted(given & settings_of(type(ours), Role.ARCHITECTURE) - {"type", "rope", "moe", "mtp"})
    moe = getattr(ours, "moe", None) if "moe" in given else None
    if moe is not None:
        excess += sorted(f"moe.{name}" for name in moe.model_fields_set & settings_of(type(moe), Role.ARCHITECTURE))
    if moe is not None and theirs.get("moe") is None:
        raise UserError(f"model.moe: {source} has no experts; remove this setting")
    if moe is not None and moe.bias_update_rate is not None:
        raise UserError(
            f"model.moe.bias_update_rate: {source} has no bias on the selection; remove it, or set aux_loss"
        )
    if excess:
        raise UserError(f"model.{excess[0]}: defined by {source} because of use_hf_model_config; remove one of the two")
    written = dict(theirs) | {name: getattr(ours, name) for name in given}
    if "mtp" in given and (mtp := getattr(ours, "mtp", None)) is not None:
        written["mtp"] = mtp.model_dump(exclude_unset=True)
    if moe is not None:
        written["moe"] = theirs["moe"] | {name: getattr(moe, name) for name in moe.model_fields_set}
    if "rope" in given:
        written["rope"] = _scaled_rope(theirs.get("rope") or {}, getattr(ours, "rope", RopeConfig()))
        log.info(f"model.rope: {source} has {theirs.get('rope') or 'the default'}, this run uses {written['rope']}")
    return written


def _scaled_rope(theirs: Mapping[str, Any], ours: RopeConfig) -> dict[str, Any]:
    """A base model's RoPE with our scaling for a longer context; another type of scaling replaces all but the bases."""
    given = {name: getattr(ours, name) for name in ours.model_fields_set}
    kept = {name: theirs[name] for name in _KEPT if name in theirs}
    return (kept if "type" in given else dict(theirs)) | given


def hf_ref(config: RunConfig) -> str | None:
    """The model to start from, None if the config names none."""
    if config.initialize_from_hf is not True:
        return config.initialize_from_hf or None
    default: str = hf_family(config.model.type).DEFAULT_REF
    return default


def config_of(ref: str) -> RunConfig:
    """A config with a model's sizes and tokenizer, and defaults for everything else."""
    settings = hf_settings(ref)
    tokenizer = {"tokenizer": ref} if has_tokenizer(ref) else {}
    return validate({"model": settings, "data": tokenizer}, f"{ref}: its config.json")


def has_tokenizer(ref: str) -> bool:
    """Whether the model's repository or folder contains a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "merges.txt")
    return any(locate(ref, name) is not None for name in names)


def check_tokens(ref: str, data: DataConfig) -> None:
    """Raise `UserError` if `data.tokenizer` assigns ids to other tokens than the model was trained on.

    One tokenizer may have more tokens than the other, and a few tokens, such as special ones, may have other names.
    """
    if found := _other_tokens(ref, data):
        raise UserError(
            f"data.tokenizer: {data.tokenizer} has other tokens for {found} than {ref} was trained on, so its "
            f"embeddings would be meaningless; set data.tokenizer: {ref} and a cache_dir for it, or "
            "allow_other_tokenizer: true"
        )


def check_teacher(config: RunConfig) -> None:
    """Raise `UserError` if the teacher of a distillation has another tokenizer."""
    objective, data = config.objective, config.data
    if isinstance(objective, DistillConfig) and (found := _other_tokens(objective.teacher, data)):
        raise UserError(
            f"objective.teacher: {objective.teacher} has other tokens for {found} than data.tokenizer "
            f"{data.tokenizer}, so its predictions are about other texts; set data.tokenizer: {objective.teacher} and "
            "a cache_dir for it"
        )


def _other_tokens(ref: str, data: DataConfig) -> str:
    """How many ids are of other tokens in the tokenizer of the model, for messages; empty for a few or none."""
    if data.tokenizer == PASSTHROUGH or not has_tokenizer(ref):
        return ""
    ours, theirs = _tokens_of(open_tokenizer(data.tokenizer)), _tokens_of(_their_tokenizer(ref))
    shared = ours.keys() & theirs.keys()
    differ = sum(ours[number] != theirs[number] for number in shared)
    return f"{differ:,} of {len(shared):,} ids" if differ > _MAX_DIFFERENT * len(shared) else ""


def _their_tokenizer(ref: str) -> Tokenizer:
    """The model's own tokenizer, needed only for its vocabulary: read without transformers from a tokenizer.json."""
    path = locate(ref, "tokenizer.json")
    return open_tokenizer(ref) if path is None or is_url(path) else load_tokenizer(os.path.dirname(path))


def _tokens_of(tokenizer: Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.backend.get_vocab().items()}


def hf_settings(ref: str) -> dict[str, Any]:
    """The `model` section equivalent to the model's `config.json`."""
    values = read_model_config(ref)
    quantization = values.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") != "mxfp4":
        raise UserError(
            f"{ref}: quantized weights (quantization_config) are not supported, but for MXFP4 (gpt-oss); use the "
            "original model"
        )
    for name in ("num_hidden_layers", "n_layer", "n_layers"):
        if isinstance(number := values.get(name), int | float) and number > MAX_LAYERS:
            raise UserError(f"{ref}: config.json: {name}: expected at most {MAX_LAYERS:,}, not {number}")
    try:
        settings: dict[str, Any] = family_of(values).from_hf_config(values)
    except UserError as error:
        raise UserError(f"{ref}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise UserError(f"{ref}: config.json: invalid value: {error}") from None
    return settings


def _check_agrees(ref: str, config: RunConfig) -> None:
    """Raise `UserError` if a setting that determines how the weights are used differs from the model's own."""
    settings = hf_settings(ref)
    theirs = validate({"model": settings}, f"{ref}: its config.json").model.meaning()
    ours = config.model.meaning()
    differ = {name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}
    if "rope" in differ and _is_longer_context(theirs, ours, config):
        differ.discard("rope")
        log.info(f"model.rope: {ref} has {theirs['rope']}, this run uses {ours['rope']}")
    if hf_family(settings["type"]).ALWAYS_HAS_BIASES and not ours.get("use_bias"):
        differ.discard("use_bias")  # loading requires theirs to be zero
    if differ:
        lines = [
            f"  model.{name}: this config has {ours.get(name)}, the model has {theirs.get(name)}"
            for name in sorted(differ)
        ]
        report = "\n".join(lines)
        raise UserError(
            f"{ref} does not match this config's model section\n{report}\n"
            "  set use_hf_model_config: true to use the model's values"
        )
    _check_length(ref, config.model.seq_len, settings)


def _is_longer_context(theirs: Mapping[str, Any], ours: Mapping[str, Any], config: RunConfig) -> bool:
    """Whether only the scaling of RoPE differs; its bases may be given, too."""
    if "rope" not in theirs or "rope" not in ours or ours["rope"]["type"] == "default":
        return False
    given: set[str] = getattr(config.model, "rope", RopeConfig()).model_fields_set
    return all(ours["rope"].get(name) == theirs["rope"].get(name) or name in given for name in ("theta", "local_theta"))


def _check_length(ref: str, seq_len: int, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` if the model has fewer learned positions than `seq_len`."""
    if hf_family(settings["type"]).HAS_LEARNED_POSITIONS and seq_len > settings["seq_len"]:
        raise UserError(f"model.seq_len: {seq_len}, but {ref} has only {settings['seq_len']} learned positions")
