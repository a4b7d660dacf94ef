"""PEFT's format of adapters: names of tensors, and `adapter_config.json` in both directions."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Row
from lmtrain.lora.adapters import A, B
from lmtrain.lora.config import LoraConfig
from lmtrain.lora.sites import EmbeddingTable, Site

CONFIG_FILE, WEIGHTS_NAME = "adapter_config.json", "adapter_model"
_PREFIX = "base_model.model."

# Settings of an adapter_config.json whose effect cannot be represented here; values without an effect are fine.
_UNSUPPORTED = (
    *("use_dora", "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication", "target_parameters"),
    *(
        "trainable_token_indices",
        "lora_bias",
        "use_qalora",
        "use_bdlora",
        "alora_invocation_tokens",
        "arrow_config",
        "kasa_config",
    ),
)


def adapter_rows(sites: Sequence[Site], tables: Sequence[EmbeddingTable]) -> list[Row]:
    """Key table of adapters: paths as in `lmtrain/lora/adapters.py`, names as in PEFT's files."""
    rows = []
    for site in sites:
        rows.append(Row(f"{site.path}/{A}", f"{_PREFIX}{site.module}.lora_A.weight"))
        rows.append(Row(f"{site.path}/{B}", f"{_PREFIX}{site.module}.lora_B.weight"))
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
    """The `adapter_config.json` of adapters on `sites`. `base_model`: NAME or NAME@REVISION in Hugging Face."""
    name, _, revision = (base_model or "").partition("@")
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


def check_adapter_config(where: str, values: Mapping[str, Any], config: LoraConfig) -> None:
    """Raise `UserError` for adapters that cannot be represented, or that do not fit the `lora` section."""
    if values.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type {values.get('peft_type')!r} is not supported; expected LORA")
    unsupported = [name for name in _UNSUPPORTED if values.get(name)]
    if values.get("bias", "none") != "none":
        unsupported.append("bias")
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


def explain_mismatch(where: str, missing: Sequence[str], unexpected: Sequence[str]) -> UserError:
    """The error for an adapter with other tensors than the `lora` section describes."""
    problems = [
        f"  {what} {name}" for what, names in (("missing", missing), ("unexpected", unexpected)) for name in names
    ]
    shown = problems[:5] + ([f"  and {len(problems) - 5} more"] if len(problems) > 5 else [])
    return UserError(
        f"{where}: its tensors do not match lora.target_modules and lora.modules_to_save; set them as in its "
        f"{CONFIG_FILE}\n" + "\n".join(shown)
    )
