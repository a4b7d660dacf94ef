"""PEFT's format of adapters: names of tensors, and `adapter_config.json` in both directions."""

from collections.abc import Sequence
from typing import Any

from lmtrain.hf.key_map import Row
from lmtrain.hf.weight_files import read_model_json
from lmtrain.lora.config import LoraConfig
from lmtrain.lora.sites import A, B, EmbeddingTable, Site, is_head_or_embedding
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import redact

CONFIG_FILE, WEIGHTS_NAME = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."

# Settings of an adapter_config.json whose effect cannot be represented here; values without an effect are fine.
_UNSUPPORTED = (
    *("use_dora", "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config"),
)

# Initializations that leave the base as it is. PEFT changes the base for the others (pissa, olora, corda, loftq, ...)
# when it loads the adapter.
_PLAIN_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")

# Duplicates of tables trained in full, which PEFT writes after embeddings were resized.
_DUPLICATES = (".modules_to_save.weight", ".original_module.weight")


def adapter_rows(sites: Sequence[Site], tables: Sequence[EmbeddingTable]) -> list[Row]:
    """Key table of adapters: paths as in `lmtrain/lora/model.py`, names as in PEFT's files."""
    rows = []
    for site in sites:
        rows.append(Row(f"{site.path}/{A}", f"{_PREFIX}{site.module}.lora_A.weight", layers=site.layers))
        name_of_b = f"{_PREFIX}{site.module}.lora_B.weight"
        rows.append(Row(f"{site.path}/{B}", name_of_b, layers=site.layers, pairs=site.pairs))
    return rows + [Row(table.path, table_name(module), vocab=True) for table in tables for module in table.modules]


def table_name(module: str) -> str:
    """The name of an embedding table's tensor, by its module."""
    return f"{_PREFIX}{module}.weight"


def to_adapter_config(
    config: LoraConfig,
    sites: Sequence[Site],
    all_sites: Sequence[Site],
    tables: Sequence[EmbeddingTable],
    base_model: str | None,
) -> dict[str, Any]:
    """The `adapter_config.json` of adapters on `sites`. `base_model`: NAME[@REVISION] in Hugging Face, or a URL."""
    name, revision = redact(base_model) or "", ""
    if "://" not in name:
        name, _, revision = name.partition("@")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or None,
        "revision": revision or None,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "target_modules": _target_modules(sites, all_sites),
        "modules_to_save": [module.rpartition(".")[2] for table in tables for module in table.modules] or None,
        "ensure_weight_tying": any(len(table.modules) > 1 for table in tables),
        "fan_in_fan_out": any(site.is_conv1d for site in sites),
        "bias": "none",
        "inference_mode": True,
    }


def _target_modules(sites: Sequence[Site], all_sites: Sequence[Site]) -> list[str]:
    """Last parts of the names where these match no other layer, else full names, one for each layer."""
    chosen = set(sites)
    names: list[str] = []
    for site in sites:
        last = site.module.rpartition(".")[2]
        if all(other in chosen for other in all_sites if other.module.rpartition(".")[2] == last):
            names.append(last)
        else:
            names += site.modules
    return sorted(set(names))


def check_adapter_config(config: LoraConfig) -> None:
    """Check the adapter of `initialize_from`, if any, before its tensors are read.

    Raises `UserError` if it cannot be represented, or does not fit the `lora` section.
    """
    if config.initialize_from is None:
        return
    where = f"lora.initialize_from: {config.initialize_from}"
    try:
        values = read_model_json(config.initialize_from, CONFIG_FILE)
    except UserError as error:
        raise UserError(f"lora.initialize_from: {error}") from None
    if values is None:
        raise UserError(f"{where}: there is no {CONFIG_FILE}; not a PEFT adapter")
    if values.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type {values.get('peft_type')!r} is not supported; expected LORA")
    unsupported = [name for name in _UNSUPPORTED if values.get(name)]
    if values.get("bias", "none") != "none":
        unsupported.append("bias")
    if values.get("init_lora_weights", True) not in _PLAIN_INITIALIZATIONS:
        unsupported.append("init_lora_weights")
    if unsupported:
        listed = ", ".join(f"{name}: {values[name]}" for name in unsupported)
        raise UserError(f"{where}: not supported: {listed}")
    alpha = values.get("lora_alpha", 8)
    theirs = {"r": values.get("r", 8), "alpha": alpha, "use_rslora": values.get("use_rslora", False)}
    differ = [
        f"  lora.{name}: this config has {getattr(config, name)}, the adapter has {value}"
        for name, value in theirs.items()
        if getattr(config, name) != value
    ]
    if differ:
        raise UserError(f"{where} does not match this config's lora section\n" + "\n".join(differ))


def read_names(stored: Sequence[str]) -> set[str]:
    """The names of a file's tensors, without the duplicates of tables."""
    return {
        name for name in stored if not (name.endswith(_DUPLICATES) and f"{name.rsplit('.', 2)[0]}.weight" in stored)
    }


def explain_mismatch(
    where: str, missing: Sequence[str], unexpected: Sequence[str], tables: Sequence[EmbeddingTable]
) -> UserError:
    """The error for an adapter with other tensors than the `lora` section describes. `tables` of the model."""
    for name in unexpected:
        module = name.removeprefix(_PREFIX).partition(".lora_")[0]
        if ".lora_" in name and is_head_or_embedding(module, tables):
            return UserError(f"{where}: not supported: an adapter on {module}; it can be trained in full only")
        if ".lora_" not in name and not is_head_or_embedding(module.removesuffix(".weight"), tables):
            return UserError(f"{where}: not supported: {name} is trained in full; only embeddings and head can be")
    problems = [f"  missing {name}" for name in missing] + [f"  unexpected {name}" for name in unexpected]
    shown = problems[:5] + ([f"  and {len(problems) - 5} more"] if len(problems) > 5 else [])
    return UserError(
        f"{where}: its tensors are not those of lora.target_modules and lora.modules_to_save; change these settings\n"
        + "\n".join(shown)
    )
