"""A trained model, from a checkpoint or from Hugging Face, for the commands eval, export-hf and generate."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.checkpoint.manifest import DamagedError
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.differences import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.hf.export import Origin
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.identity import identity
from lmtrain.run.run import Run
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import join, list_names
from lmtrain.train.start.hf_model import config_of, hf_ref
from lmtrain.train.start.run_logs import tokenizer_of

if TYPE_CHECKING:
    from lmtrain.models.interface import LanguageModel
    from lmtrain.sharding.mesh import Layout


class Loaded(NamedTuple):
    """A Linen module, its parameters, and the layout they are on."""

    model: "LanguageModel"
    params: Any
    layout: "Layout"


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: its source, its number of training steps if known, its config and its tokenizer.

    `origin` is its run, None if it is from Hugging Face. `get_params(model, layout)` loads the arrays; nothing imports
    JAX before `load`.
    """

    source: str
    step: int | None
    config: RunConfig
    tokenizer: Tokenizer
    get_params: Callable[..., Any]
    origin: Origin | None = None

    def load(self) -> Loaded:
        """The model with its parameters, on the devices of this machine."""
        from lmtrain.lora.model import adapt
        from lmtrain.models.registry import build_model
        from lmtrain.sharding.mesh import plan_layout, platform_of
        from lmtrain.train.program.program import plan_attention

        layout = plan_layout(self.config.trainer)
        attention = plan_attention(self.config, platform_of(layout.mesh.devices.flat[0]), trains=False)
        model = build_model(self.config.model, self.tokenizer.vocab_size, attention)
        model = adapt(self.config.lora, self.config.model, model)
        return Loaded(model, self.get_params(model, layout), layout)


def from_checkpoint(run: Run, path: str | None) -> TrainedModel:
    """The checkpoint at `path`, by default the newest of the config's own run.

    Raises `UserError` if there is none, or if its model or tokenizer differs from the config.
    """
    config = run.config
    settings = config.trainer.checkpointer
    others = _other_runs(run) if path is None else []
    try:
        checkpoint = choose_checkpoint(path or run.checkpoints, settings.verify_on_restore, parts=("params", "average"))
    except UserError as error:
        if not others:
            raise
        raise UserError(
            f"{error}; other runs of {run.loaded.path}: {_listed(others)}; add --run ID to use one"
        ) from None
    run_info = checkpoint.read_run_info()
    log.info(f"run {run_info['run_id']}, step {checkpoint.step:,}: {checkpoint.path}")
    saved_at = checkpoint.read_manifest().saved
    if newer := [other for other in others if other.saved > saved_at]:
        log.warning(
            f"newer runs of {run.loaded.path}, with other settings: {_listed(newer)}; repeat their settings, or add "
            "--run ID to use one"
        )
    saved = run_info["identity"]
    tokenizer = tokenizer_of(run, saved["tokenizer"])
    ours = identity(config)
    now = {"model": ours["model"], "tokenizer": tokenizer.identity, "lora": ours.get("lora")}
    differences = describe_differences({name: saved.get(name) for name in now}, now, "the checkpoint", "this config")
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(f"{checkpoint.path} does not match this config's model\n{report}")

    def get_params(model: "LanguageModel", layout: "Layout") -> Any:
        from lmtrain.lora.model import ADAPTERS, BASE, AdaptedModel
        from lmtrain.train.start import base
        from lmtrain.train.start.restore import restore_params

        params = restore_params(checkpoint, model, layout, settings.staging_dir)
        if not isinstance(model, AdaptedModel):
            return params
        frozen = base.load_base(config, model, layout, hf_ref(config), tokenizer.identity, run_info[base.BASE])
        return {BASE: frozen.params, ADAPTERS: params}

    origin = Origin(run_info["run_id"], saved["data_tokens"])
    return TrainedModel(checkpoint.path, checkpoint.step, config, tokenizer, get_params, origin)


class _Other(NamedTuple):
    """Another run of the same config file: the step and time of its newest checkpoint."""

    run: str
    step: int
    saved: float


def _other_runs(run: Run) -> list[_Other]:
    """Other runs of the same config file that have checkpoints, newest first: started with other overrides."""
    parent, name = os.path.dirname(run.checkpoints), os.path.basename(run.checkpoints)
    made = re.compile(re.escape(run.id.rpartition("-")[0]) + "-[0-9a-f]{6}")
    if run.is_named or name != run.id or not made.fullmatch(run.id):
        return []
    found = []
    for other in list_names(parent):
        if other != run.id and made.fullmatch(other) and (checkpoints := list_checkpoints(join(parent, other))):
            with suppress(DamagedError):
                found.append(_Other(other, checkpoints[-1].step, checkpoints[-1].read_manifest().saved))
    return sorted(found, key=lambda other: -other.saved)


def _listed(others: list[_Other]) -> str:
    return ", ".join(f"{other.run} (step {other.step:,})" for other in others[:3])


def from_hf_alone(ref: str) -> TrainedModel:
    """The Hugging Face model `ref` with its own sizes and tokenizer. Raises `UserError` if it has no tokenizer."""
    config = config_of(ref)
    if "tokenizer" not in config.data.model_fields_set:
        raise UserError(f"--hf {ref}: no tokenizer in this repository")
    return from_hf(ref, config)


def from_hf(ref: str, config: RunConfig) -> TrainedModel:
    """The Hugging Face model `ref`, with sizes and tokenizer from `config`."""
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)

    def get_params(model: "LanguageModel", layout: "Layout") -> Any:
        from lmtrain.train.start.hf_params import load_hf_params

        return load_hf_params(ref, config.model, model, layout, config.trainer.precision.params)

    config = config.model_copy(update={"lora": None})  # of the config's own run
    return TrainedModel(ref, None, config, tokenizer, get_params)
