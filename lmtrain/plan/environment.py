"""Environment variables that let JAX and a compiler plan for devices that are not present."""

import os

from lmtrain.plan.request import Target
from lmtrain.runtime.accelerators import ACCELERATORS


def environment(target: Target, compiles: bool) -> dict[str, str]:
    """Variables that JAX and the target's compiler read when they are loaded; only for the worker's process."""
    if target.kind is None and not target.shape:
        return {}
    common = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if target.kind is None or not compiles:
        topology = target.topology
        number = topology.num_devices if topology else target.shape[0]
        flags = os.environ.get("XLA_FLAGS", "")
        return common | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={number}".strip()}
    if ACCELERATORS[target.kind].platform == "gpu":
        return common | {"CUDA_VISIBLE_DEVICES": ""}
    # libtpu would otherwise query a metadata server, which only Google's machines have; and use a lock file
    return common | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_LOG_DIR": "disabled",
    }
