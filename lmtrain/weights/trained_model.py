"""A trained model, from a checkpoint, the average of several or Hugging Face, for the commands eval, export-hf and
generate.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lmtrain.checkpoint.config import Kind
from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoints, list_checkpoints
from lmtrain.checkpoint.manifest import DamagedError
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.section import Role, settings_of
from lmtrain.config.tree import require_equal
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run, identity
from lmtrain.runtime.errors import UserError, errors_of
from lmtrain.runtime.logging import ALONE, Processes, log
from lmtrain.runtime.storage import join, list_names
from lmtrain.weights.export_folder import BaseIdentity, ModelOrigin
from lmtrain.weights.hf_config import config_of, hf_ref, resolve_hf
from lmtrain.weights.lora_base import BASE_ITEM, load_base
from lmtrain.weights.model_card import ModelCard
from lmtrain.weights.run_files import generation_of, template_of, tokenizer_of

if TYPE_CHECKING:
    from lmtrain.models.interface import LanguageModel
    from lmtrain.sharding.mesh import Layout


# Key of a checkpoint's run info: the fingerprint of the model that preferences are relative to.
REFERENCE = "reference"

# Averages of checkpoints: which ones `--average` names, and the mean of their parameters.
#
# The mean over the end of a run often has a lower loss than its last step (Izmailov et al. 2018, stochastic weight
# averaging; Li et al. 2022, latest weight averaging).

# Parts of a checkpoint that are read.
_PARTS = ("params", "average")


def named_checkpoints(average: str, folder: str, verification: str) -> list[Checkpoint]:
    """The checkpoints that `average` names, verified: a number N is the last N permanent ones in `folder`, a list has
    steps there or paths. The last one is that of most steps.

    Raises `UserError` if one is missing or corrupt.
    """
    names = [name.strip() for name in average.split(",")]
    if len(names) == 1:
        paths = [checkpoint.path for checkpoint in _last(average, folder)]
    else:
        paths = [join(folder, f"step-{name}") if name.isdigit() else name for name in names]
    checkpoints = [choose_checkpoint(path, verification, parts=_PARTS) for path in paths]
    if len({checkpoint.path for checkpoint in checkpoints}) < len(checkpoints):
        raise UserError(f"--average {average}: names a checkpoint twice")
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _last(number: str, folder: str) -> list[Checkpoint]:
    if not re.fullmatch(r"[1-9]\d*", number) or int(number) < 2:
        raise UserError(f"--average {number}: expected a number of at least 2, or a list of steps or paths: A,B,C")
    found = [c for c in find_checkpoints(folder) if c.read_manifest().kind is Kind.PERMANENT]
    if len(found) < int(number):
        steps = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
        raise UserError(
            f"--average {number}: {folder} has {len(found)} permanent checkpoints (steps: {steps}); a run keeps those "
            "of trainer.checkpointer.keep"
        )
    return found[-int(number) :]


def mean_params(checkpoints: Sequence[Checkpoint], load: Callable[[Checkpoint], Any]) -> Any:
    """The mean of the parameters that `load` gives for each checkpoint, in their dtype, summed in float32."""
    import jax
    import jax.numpy as jnp

    first, *others = checkpoints
    params = load(first)
    if not others:
        return params
    dtypes = jax.tree.map(lambda value: value.dtype, params)
    add = jax.jit(lambda total, params: jax.tree.map(jnp.add, total, params), donate_argnums=0)
    total = jax.tree.map(lambda value: value.astype(jnp.float32), params)
    for checkpoint in others:
        total = add(total, load(checkpoint))
    return jax.tree.map(lambda value, dtype: (value / len(checkpoints)).astype(dtype), total, dtypes)


class LoadedModel(NamedTuple):
    """A Linen module, its parameters, and the layout they are on."""

    model: "LanguageModel"
    params: Any
    layout: "Layout"


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model: its source, its number of training steps if known, its config and its tokenizer.

    `origin` is its run, None if it is from Hugging Face. `chat_template` is that of its training data, if any;
    `generation` are the settings of generation of its initial model; `card` is for a README.md; `reference` is the
    fingerprint of the model that its preferences are relative to, if any.
    `get_params(model, layout)` loads the arrays; nothing imports JAX before `load`.
    """

    source: str
    step: int | None
    config: RunConfig
    tokenizer: Tokenizer
    get_params: Callable[..., Any]
    origin: ModelOrigin | None = None
    chat_template: ChatTemplate | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    card: ModelCard | None = None
    reference: str | None = None

    def load(self) -> LoadedModel:
        """The model with its parameters, on the devices of this machine."""
        from lmtrain.lora.model import adapt
        from lmtrain.models.attention.kernel import choose_attention, log_attention
        from lmtrain.models.registry import build_model
        from lmtrain.sharding.mesh import build_layout, platform_of

        layout = build_layout(self.config.trainer)
        device = layout.mesh.devices.flat[0]
        needs, platform = self.config.attention_needs(trains=False), platform_of(device)
        attention = choose_attention(needs, platform, device.device_kind)
        log_attention(attention, needs, platform)
        model = build_model(self.config.model, self.tokenizer.vocab_size, attention.name)
        model = adapt(self.config.lora, self.config.model, model)
        return LoadedModel(model, self.get_params(model, layout), layout)


def from_checkpoint(run: Run, path: str | None, average: str | None = None) -> TrainedModel:
    """The checkpoint at `path`, by default the newest of the config's own run; or the average of those that `average`
    names, see `named_checkpoints`.

    Raises `UserError` if there is none, or if its model or tokenizer differs from the config.
    """
    run = resolve_hf(run, path)
    config = run.config
    checkpoints = [_choose(run, path)] if average is None else _averaged(run, path, average)
    checkpoint = checkpoints[-1]
    run_info = checkpoint.read_run_info()
    saved = run_info["identity"]
    tokenizer = tokenizer_of(run, saved["tokenizer"])
    ours = identity(config)
    now = {"model": ours["model"], "tokenizer": tokenizer.identity, "lora": ours.get("lora")}
    for each in checkpoints:
        theirs = each.read_run_info()["identity"]
        theirs = {name: theirs.get(name) for name in now}
        require_equal(theirs, now, f"{each.path} does not match this config's model")

    def get_params(model: "LanguageModel", layout: "Layout") -> Any:
        from lmtrain.lora import model as lora
        from lmtrain.weights.load_checkpoint import restore_params

        staging_dir = config.trainer.checkpointer.staging_dir
        params = mean_params(checkpoints, lambda each: restore_params(each, model, layout, staging_dir))
        if not isinstance(model, lora.AdaptedModel):
            return params
        frozen = load_base(config, model, layout, hf_ref(config), tokenizer.identity, run_info[BASE_ITEM])
        return {lora.BASE: frozen.params, lora.ADAPTERS: params}

    trained_on = None
    if config.lora is not None and config.base_dtype is not None:
        trained_on = BaseIdentity(run_info[BASE_ITEM]["fingerprint"], config.base_dtype)
    origin = ModelOrigin(run_info["run_id"], saved["data_tokens"], trained_on)
    template = template_of(run, tokenizer)
    source = checkpoint.path if average is None else f"average of {', '.join(each.path for each in checkpoints)}"
    return TrainedModel(
        source=source,
        step=checkpoint.step,
        config=config,
        tokenizer=tokenizer,
        get_params=get_params,
        origin=origin,
        chat_template=template,
        generation=generation_of(run),
        reference=run_info.get(REFERENCE),
        card=ModelCard(
            run=run_info["run_id"],
            config=run_info["config"],
            initial=hf_ref(config),
            averaged=() if average is None else tuple(each.step for each in checkpoints),
        ),
    )


def load_initial(config: RunConfig, model: "LanguageModel", layout: "Layout", processes: Processes = ALONE) -> Any:
    """The parameters that a run without adapters started from."""
    from lmtrain.weights.load_checkpoint import restore_params
    from lmtrain.weights.load_hf import load_hf_params

    ref, path = hf_ref(config), config.initialize_from_checkpoint_path
    if ref is not None:
        return load_hf_params(ref, config.model, model, layout, config.trainer.precision.params)
    assert path is not None
    settings = config.trainer.checkpointer
    with errors_of("initialize_from_checkpoint_path"):
        checkpoint = choose_checkpoint(path, settings.verify_on_restore, processes, parts=("params",))
        return restore_params(checkpoint, model, layout, settings.staging_dir, averaged=False)


def _averaged(run: Run, path: str | None, average: str) -> list[Checkpoint]:
    """The checkpoints to average; logs them."""
    if run.config.lora is not None:
        raise UserError("--average: this run has adapters, whose average is not the adapter of an average model")
    verification = run.config.trainer.checkpointer.verify_on_restore
    checkpoints = named_checkpoints(average, path or run.checkpoints, verification)
    steps = ", ".join(f"{checkpoint.step:,}" for checkpoint in checkpoints)
    log.info(f"run {checkpoints[-1].read_run_info()['run_id']}, average of steps {steps}")
    return checkpoints


def _choose(run: Run, path: str | None) -> Checkpoint:
    """The checkpoint to load; logs it, and newer ones of other runs of the same config file."""
    verification = run.config.trainer.checkpointer.verify_on_restore
    others = _other_runs(run) if path is None else []
    try:
        checkpoint = choose_checkpoint(path or run.checkpoints, verification, parts=("params", "average"))
    except UserError as error:
        if not others:
            raise
        raise UserError(
            f"{error}; other runs of {run.loaded.path}: {_listed(others)}; add --run ID to use one"
        ) from None
    log.info(f"run {checkpoint.read_run_info()['run_id']}, step {checkpoint.step:,}: {checkpoint.path}")
    saved_at = checkpoint.read_manifest().saved
    if newer := [other for other in others if other.saved > saved_at]:
        log.warning(
            f"newer runs of {run.loaded.path}, with other settings: {_listed(newer)}; repeat their settings, or add "
            "--run ID to use one"
        )
    return checkpoint


class _OtherRun(NamedTuple):
    """Another run of the same config file: the step and time of its newest checkpoint."""

    run: str
    step: int
    saved: float


def _other_runs(run: Run) -> list[_OtherRun]:
    """Other runs of the same config file that have checkpoints, newest first: started with other overrides."""
    parent, name = os.path.dirname(run.checkpoints), os.path.basename(run.checkpoints)
    made = re.compile(re.escape(run.id.rpartition("-")[0]) + "-[0-9a-f]{6}")
    if run.is_named or name != run.id or not made.fullmatch(run.id):
        return []
    others = []
    for other in list_names(parent):
        if other != run.id and made.fullmatch(other) and (checkpoints := list_checkpoints(join(parent, other))):
            with suppress(DamagedError):
                others.append(_OtherRun(other, checkpoints[-1].step, checkpoints[-1].read_manifest().saved))
    return sorted(others, key=lambda other: -other.saved)


def _listed(others: list[_OtherRun]) -> str:
    return ", ".join(f"{other.run} (step {other.step:,})" for other in others[:3])


def from_hf(ref: str, config: RunConfig | None = None) -> TrainedModel:
    """The Hugging Face model `ref` with its own sizes; its data and other settings are those of `config`, if any.

    Raises `UserError` if there is no tokenizer, or if that of the config gives other token ids than the model's own.
    """
    config = config_of(ref) if config is None else _with_sizes_of(ref, config)
    if "tokenizer" not in config.data.model_fields_set:
        raise UserError(f"--hf {ref}: no tokenizer in this repository")
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)
    params = config.trainer.precision.params

    def get_params(model: "LanguageModel", layout: "Layout") -> Any:
        from lmtrain.weights.load_hf import load_hf_params

        return load_hf_params(ref, config.model, model, layout, params)

    return TrainedModel(source=ref, step=None, config=config, tokenizer=tokenizer, get_params=get_params)


def _with_sizes_of(ref: str, config: RunConfig) -> RunConfig:
    """The config with the model `ref`, and its own model settings that do not change what the weights mean."""
    own = config_of(ref)
    family = type(own.model)
    free = family.model_fields.keys() - settings_of(family, Role.ARCHITECTURE)
    given = {name: getattr(config.model, name) for name in config.model.model_fields_set & free}
    data = config.data
    if "tokenizer" not in data.model_fields_set:
        data = data.model_copy(update={"tokenizer": ref})
    elif (
        "tokenizer" in own.data.model_fields_set
        and open_tokenizer(data.tokenizer, data.vocab_size).identity != open_tokenizer(ref).identity
    ):
        raise UserError(
            f"data.tokenizer: {data.tokenizer} gives other tokens than {ref} was trained on; set "
            f"data.tokenizer: {ref}, and a cache_dir for it"
        )
    # `lora` is of the config's own run
    return config.model_copy(update={"model": own.model.model_copy(update=given), "data": data, "lora": None})
