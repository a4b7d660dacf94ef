"""The frozen base of a run with LoRA: a Hugging Face model or a checkpoint of lmtrain."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoints
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.differences import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.hf.weights import open_weights, read_model_config
from lmtrain.run.config import RunConfig
from lmtrain.run.identity import identity
from lmtrain.run.precision import parse_precision
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes

if TYPE_CHECKING:
    from lmtrain.lora.model import AdaptedModel
    from lmtrain.sharding.mesh import Layout

# Key of a checkpoint's run info: the base of its adapters.
BASE = "base"

_PATH = "initialize_from_checkpoint_path"
_DTYPES = ("float32", "bfloat16", "float16")


class Base(NamedTuple):
    """Frozen parameters, where they are from (`hf` or `checkpoint`, with the step), and their fingerprint."""

    params: Any
    source: Mapping[str, Any]
    fingerprint: str

    @property
    def run_info(self) -> dict[str, Any]:
        return {**self.source, "fingerprint": self.fingerprint}


def base_dtype(config: RunConfig, ref: str | None) -> str:
    """The dtype of the base's weights: as `config.json` gives it, else as they are stored. `ref`: see `hf_ref`."""
    if ref is None:
        checkpoint = _checkpoint(config, None)
        saved: str = parse_precision(checkpoint.read_run_info()["config"]["trainer"]["mp"]).params
        return saved
    values = read_model_config(ref)
    given = values.get("dtype") or values.get("torch_dtype")
    if given in _DTYPES:
        return str(given)
    stored = {dtype for dtype in open_weights(ref).dtypes.values() if dtype in _DTYPES}
    return stored.pop() if len(stored) == 1 else "float32"


def load_base(
    config: RunConfig,
    model: "AdaptedModel",
    layout: "Layout",
    ref: str | None,
    tokenizer: Mapping[str, Any],
    saved: Mapping[str, Any] | None = None,
    processes: Processes = ALONE,
) -> Base:
    """The base on its devices. `saved` describes the base of the checkpoint that adapters come from.

    `tokenizer` is the identity of the run's tokenizer.

    Raises `UserError` if the base is missing, or differs from the saved one.
    """
    from lmtrain.lora.fingerprint import fingerprint

    dtype = config.base_dtype
    assert dtype is not None
    source: dict[str, Any]
    try:
        if ref is not None:
            from lmtrain.train.start.hf_params import load_hf_params

            source = {"initialize_from_hf": ref}
            params = load_hf_params(ref, config.model, model.inner, layout, dtype, trained=model.in_full)
        else:
            from lmtrain.models.params import cast
            from lmtrain.train.start.restore import restore_params

            checkpoint = _checkpoint(config, saved, processes)
            _check_tokenizer(checkpoint, tokenizer)
            source = {_PATH: checkpoint.path, "step": checkpoint.step}
            params = restore_params(checkpoint, model.inner, layout, config.trainer.checkpointer.staging_dir)
            params = cast(params, dtype)
    except UserError as error:
        raise UserError(f"the base model of the adapters cannot be loaded: {error}") from None
    found = Base(params, source, fingerprint(params, layout))
    if saved is not None and saved["fingerprint"] != found.fingerprint:
        where = next(iter(source.values()))
        raise UserError(
            f"the base model of the adapters has changed: {where} has the fingerprint {found.fingerprint[:12]}, but "
            f"they were trained on {saved['fingerprint'][:12]} ({saved.get('initialize_from_hf') or saved[_PATH]}); "
            "restore it, or start a new run with another trainer.id"
        )
    log.info(f"base model: {next(iter(source.values()))}, {dtype}, frozen; fingerprint {found.fingerprint[:12]}")
    return found


def _checkpoint(config: RunConfig, saved: Mapping[str, Any] | None, processes: Processes = ALONE) -> Checkpoint:
    """The base's checkpoint: the saved one as long as it exists, else the newest at the config's path."""
    path = config.initialize_from_checkpoint_path
    assert path is not None
    how = config.trainer.checkpointer.verify_on_restore
    kept = [one.path for one in find_checkpoints(path) if saved is not None and one.step == saved.get("step")]
    try:
        found = choose_checkpoint(kept[0] if kept else path, how, processes, parts=("params", "average"))
    except UserError as error:
        raise UserError(f"{_PATH}: {error}") from None
    info = found.read_run_info()["identity"]
    if "lora" in info:
        raise UserError(
            f"{_PATH}: {found.path} has adapters only; merge them first with `lmtrain export-hf --merge`, and set "
            "initialize_from_hf to that folder"
        )
    differences = describe_differences(
        {"model": info["model"]}, {"model": identity(config)["model"]}, "the checkpoint", "this config"
    )
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(f"{_PATH}: {found.path} does not match this run\n{report}")
    return found


def _check_tokenizer(checkpoint: Checkpoint, ours: Mapping[str, Any]) -> None:
    """Raise `UserError` if the base was trained with another tokenizer: its tables have no rows for new tokens."""
    theirs = checkpoint.read_run_info()["identity"]["tokenizer"]
    differences = describe_differences({"tokenizer": theirs}, {"tokenizer": ours}, "the checkpoint", "this config")
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(
            f"{_PATH}: {checkpoint.path} has another tokenizer\n{report}\n  use the same tokenizer; or export the base "
            "with `lmtrain export-hf` and set initialize_from_hf, which adds rows for new tokens"
        )
