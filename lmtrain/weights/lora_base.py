"""The frozen base of LoRA, from a checkpoint or from Hugging Face. Imports no JAX before the base is loaded."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoints
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.tree import require_equal
from lmtrain.hf.weight_files import open_weights, read_model_config
from lmtrain.run.config import RunConfig
from lmtrain.run.execution import parse_precision
from lmtrain.run.run import identity
from lmtrain.runtime.errors import UserError, errors_of
from lmtrain.runtime.logging import ALONE, Processes, log
from lmtrain.weights.export_folder import BaseIdentity

if TYPE_CHECKING:
    from lmtrain.lora.model import AdaptedModel
    from lmtrain.sharding.mesh import Layout
    from lmtrain.weights.load_hf import Keep

# Key of a checkpoint's run info: the base of its adapters. Its name in the state, too.
BASE_ITEM = "base"

_PATH = "initialize_from_checkpoint_path"
_DTYPES = ("float32", "bfloat16", "float16")


class LoadedModel(NamedTuple):
    """Parameters of a model that is not trained, their fingerprint and dtype, and for checkpoints its origin."""

    params: Any
    identity: BaseIdentity
    run_info: Mapping[str, Any]


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
    store: "Keep | None" = None,
) -> LoadedModel:
    """The base on its devices. `saved` describes the base of the checkpoint that adapters come from.

    `tokenizer` is the identity of the run's tokenizer. `store` returns the arrays that are kept of a parameter, which
    is called for each as soon as it is read.

    Raises `UserError` if the base is missing, or differs from the saved one.
    """
    from lmtrain.lora.model import digest, fingerprint_part
    from lmtrain.models.params import cast, flatten, unflatten
    from lmtrain.weights.load_checkpoint import restore_params
    from lmtrain.weights.load_hf import load_hf_params

    dtype, parts = config.base_dtype, []
    assert dtype is not None

    def keep(path: str, array: Any) -> dict[str, Any]:
        parts.append(fingerprint_part(path, array, layout))
        return {path: array} if store is None else store(path, array)

    source: dict[str, Any]
    with errors_of("the base model of the adapters cannot be loaded"):
        if ref is not None:
            where, source = ref, {"initialize_from_hf": ref}
            params = load_hf_params(ref, config.model, model.inner, layout, dtype, trained=model.in_full, keep=keep)
        else:
            checkpoint = _checkpoint(config, saved, processes)
            require_equal(
                {"tokenizer": checkpoint.read_run_info()["identity"]["tokenizer"]},
                {"tokenizer": tokenizer},  # its tables have no rows for new tokens
                f"{_PATH}: {checkpoint.path} has another tokenizer",
                "use the same tokenizer; or export the base with `lmtrain export-hf` and set initialize_from_hf, which "
                "adds rows for new tokens",
            )
            where, source = checkpoint.path, {_PATH: checkpoint.path, "step": checkpoint.step}
            params = restore_params(checkpoint, model.inner, layout, config.trainer.checkpointer.staging_dir)
            flat: dict[str, Any] = {}
            for path, array in flatten(cast(params, dtype)).items():
                flat |= keep(path, array)
            params = unflatten(flat)
    found = digest(parts)
    if saved is not None and saved["fingerprint"] != found:
        raise UserError(
            f"the base model of the adapters has changed: {where} has the fingerprint {found[:12]}, but "
            f"they were trained on {saved['fingerprint'][:12]} ({saved.get('initialize_from_hf') or saved[_PATH]}); "
            "restore it, or start a new run with another trainer.id"
        )
    bits = "" if store is None or config.base_quantization is None else f", matrices in {config.base_quantization}"
    log.info(f"base model: {where}, {dtype}{bits}, frozen; fingerprint {found[:12]}")
    return LoadedModel(params, BaseIdentity(found, dtype), {**source, "fingerprint": found})


def _checkpoint(config: RunConfig, saved: Mapping[str, Any] | None, processes: Processes = ALONE) -> Checkpoint:
    """The base's checkpoint: the saved one as long as it exists, else the newest at the config's path."""
    path = config.initialize_from_checkpoint_path
    assert path is not None
    kept = [other.path for other in find_checkpoints(path) if saved is not None and other.step == saved.get("step")]
    with errors_of(_PATH):
        verification = config.trainer.checkpointer.verify_on_restore
        checkpoint = choose_checkpoint(kept[0] if kept else path, verification, processes, parts=("params", "average"))
        info = checkpoint.read_run_info()["identity"]
        if "lora" in info:
            raise UserError(
                f"{checkpoint.path} has adapters only; merge them first with `lmtrain export-hf --merge`, and set "
                "initialize_from_hf to that folder"
            )
        ours = {"model": identity(config)["model"]}
        require_equal({"model": info["model"]}, ours, f"{checkpoint.path} does not match this run")
    return checkpoint
