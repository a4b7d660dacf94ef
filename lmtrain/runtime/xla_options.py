"""XLA compiler options: defaults for each platform, chosen by comparing compiled programs, and those of the config."""

from collections.abc import Mapping

from lmtrain.config.errors import UserError
from lmtrain.runtime.accelerators import find_accelerator

Option = bool | int | float | str

_DEFAULTS: dict[str, dict[str, Option]] = {
    "cpu": {},
    "gpu": {},
    "tpu": {
        # Without it, a product whose inputs FSDP splits accumulates partial results of its full output in HBM: the
        # layers of llama2_7b then take 1.7 times as long on 32 v5p.
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
        # Overlap the all-gather of the next weights with the running product, which would wait for them otherwise.
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
        # The same for large all-reduces of gradients: 2.5 % of llama3_8b's step on 256 v5e, for no memory.
        "xla_enable_async_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    },
}
# Defaults that a kind of device has not: the products of a v6e become slower by more than its all-reduces take.
_NOT_FOR = {"v6e": ("xla_enable_async_all_reduce", "xla_tpu_enable_async_collective_fusion_fuse_all_reduce")}

# Signs in XLA's messages of an unknown option or an invalid value.
_REFUSALS = ("No such compile option", "While setting option")


def xla_options(given: Mapping[str, Option | None], platform: str, device_kind: str) -> dict[str, Option]:
    """The options to compile with: defaults of the devices, overridden by `given`; null removes a default."""
    accelerator = find_accelerator(device_kind)
    without = dict.fromkeys(_NOT_FOR.get(accelerator.kind if accelerator else "", ()))
    merged = {**_DEFAULTS[platform], **without, **given}
    return {name: value for name, value in merged.items() if value is not None}


def refused_option(error: Exception) -> UserError | None:
    """The `UserError` to raise if the compiler refused an option; None for any other error."""
    text = str(error)
    if not any(sign in text for sign in _REFUSALS):
        return None
    reason = text.splitlines()[0].partition(": ")[2]
    return UserError(f"trainer.xla_options: invalid XLA option: {reason}; correct or remove it")
