"""Answers a request in a separate process: `python -m lmtrain.plan.worker REQUEST.json FOLDER`.

Writes into the folder `program.json`, then for each step `<step>.json` and `<step>.hlo.gz`, all atomically. A user
error is written to `error.txt` next to the request, with exit code 2; errors of the compiler go to standard error, with
exit code 1.
"""

import gzip
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmtrain.plan.request import Request, Target
from lmtrain.runtime.accelerators import ACCELERATORS
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.machine import end_with_parent
from lmtrain.runtime.storage import write_atomically

# JAX's devices for a target: those of a topology that need not be present, or those of this machine.
#
# XLA's compiler for NVIDIA GPUs takes a description of the GPU. Numbers of streaming multiprocessors, clocks, caches
# and memory are those of NVIDIA's data sheets and architecture whitepapers (A100, Ada, H100, H200, Blackwell); limits
# of a compute capability those of the CUDA programming guide's table "Technical Specifications per Compute Capability".

_KIB = 2**10


@dataclass(frozen=True, kw_only=True)
class _Capability:
    """Limits of a compute capability. Sizes of shared memory in bytes."""

    major: int
    minor: int
    threads_per_core: int
    lanes_per_core: int
    shared_per_core: int
    shared_per_block: int


_SM80 = _Capability(
    major=8, minor=0, threads_per_core=2048, lanes_per_core=64, shared_per_core=164 * _KIB, shared_per_block=163 * _KIB
)
_SM75 = _Capability(
    major=7, minor=5, threads_per_core=1024, lanes_per_core=64, shared_per_core=64 * _KIB, shared_per_block=64 * _KIB
)
_SM86 = _Capability(
    major=8, minor=6, threads_per_core=1536, lanes_per_core=128, shared_per_core=100 * _KIB, shared_per_block=99 * _KIB
)
_SM89 = _Capability(
    major=8, minor=9, threads_per_core=1536, lanes_per_core=128, shared_per_core=100 * _KIB, shared_per_block=99 * _KIB
)
_SM90 = _Capability(
    major=9, minor=0, threads_per_core=2048, lanes_per_core=128, shared_per_core=228 * _KIB, shared_per_block=227 * _KIB
)
_SM100 = replace(_SM90, major=10)

# kind -> capability, multiprocessors, clock in GHz, L2 cache in MiB, the driver's name of the device
_GPUS = {
    "a100-40gb": (_SM80, 108, 1.41, 40, "NVIDIA A100-SXM4-40GB"),
    "a100": (_SM80, 108, 1.41, 40, "NVIDIA A100-SXM4-80GB"),
    "t4": (_SM75, 40, 1.59, 4, "Tesla T4"),
    "a10g": (_SM86, 80, 1.71, 6, "NVIDIA A10G"),
    "a6000": (_SM86, 84, 1.80, 6, "NVIDIA RTX A6000"),
    "3090": (_SM86, 82, 1.70, 6, "NVIDIA GeForce RTX 3090"),
    "4090": (_SM89, 128, 2.52, 72, "NVIDIA GeForce RTX 4090"),
    "l4": (_SM89, 58, 2.04, 48, "NVIDIA L4"),
    "l40s": (_SM89, 142, 2.52, 96, "NVIDIA L40S"),
    "h100": (_SM90, 132, 1.98, 50, "NVIDIA H100 80GB HBM3"),
    "h200": (_SM90, 132, 1.98, 50, "NVIDIA H200"),
    "b200": (_SM100, 148, 1.965, 126, "NVIDIA B200"),
}

_CUDNN = (9, 8, 0)


def open_devices(target: Target, compiles: bool) -> list[Any]:
    """JAX's devices. Without the compiler of their kind, the same number of fake CPU devices."""
    import jax
    from jax.experimental import topologies

    topology = target.topology
    if topology is None or not compiles:
        return jax.devices()
    kind = topology.accelerator.kind
    if topology.accelerator.platform == "gpu":
        # slices x hosts x devices: hosts of one slice would be joined by NVLink
        shape = f"{topology.slices}x1x{topology.per_slice}"
        options: dict[str, Any] = {"target_config": target_config(kind), "topology": shape}
        return list(topologies.get_topology_desc(topology.name, "cuda", **options).devices)
    name = f"{'v5' if kind == 'v5p' else kind}:{'x'.join(map(str, topology.shape))}"
    options = {"num_slices": topology.slices, "wrap": topology.wrap, "chips_per_host_bounds": topology.host_bounds}
    if len(topology.shape) == 3:
        options["chip_config_name"] = "megacore"  # two cores of a chip are one device
    return list(topologies.get_topology_desc(name, "tpu", **options).devices)


def target_config(kind: str) -> str:
    """The description of a GPU for `jax.experimental.topologies.get_topology_desc(target_config=...)`."""
    capability, cores, clock, cache, name = _GPUS[kind]
    accelerator = ACCELERATORS[kind]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_core: {capability.shared_per_core}
  shared_memory_per_block_optin: {capability.shared_per_block}
  threads_per_core_limit: {capability.threads_per_core}
  core_count: {cores}
  fpus_per_core: {capability.lanes_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(accelerator.memory_bandwidth)}
  l2_cache_size: {cache * _KIB * _KIB}
  clock_rate_ghz: {clock}
  device_memory_size: {accelerator.memory}
  cuda_compute_capability {{ major: {capability.major} minor: {capability.minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
device_description_str: "{name}"
"""


# Parts of compilers' messages that a program does not fit.
_DOES_NOT_FIT = ("RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory", "exceeds available memory")


def main(argv: list[str]) -> int:
    """Answer one request, `argv[0]`, into the folder `argv[1]`. -> exit code"""
    end_with_parent(os.getppid())  # so that no compiler keeps using memory
    path = Path(argv[0])
    try:
        answer(Request.from_json(path.read_text()), argv[1])
    except UserError as error:
        path.with_name("error.txt").write_text(str(error))
        return 2
    return 0


def answer(request: Request, folder: str) -> None:
    """Write all figures of a request to a folder."""
    import jax

    from lmtrain.plan.figures import compiled_figures, describe
    from lmtrain.plan.measure import measure
    from lmtrain.runtime.accelerators import find_accelerator, refused_option
    from lmtrain.train.program.program import build_program

    devices = open_devices(request.target, request.compile)
    topology = request.target.topology
    accelerator = topology.accelerator if topology else find_accelerator(devices[0].device_kind)
    slice_ids = topology.slice_ids if topology else None
    program = build_program(request.run_config, request.vocab_size, devices, slice_ids, accelerator)
    kind = accelerator.kind if accelerator else devices[0].device_kind
    _write(folder, "program", {"device": kind, "devices": len(devices), **describe(program, accelerator)})
    for step in request.steps if request.compile else ():
        if step == "measure":
            _write(folder, step, measure(program, accelerator))
            continue
        try:
            with jax.default_device(devices[0]):  # whose features tokamax looks at when it is traced
                compiled = lower(program, step).compile()
        except Exception as error:
            if refused := refused_option(error):
                raise refused from None
            if not any(sign in str(error) for sign in _DOES_NOT_FIT):
                raise
            _write(folder, step, {"step": step, "does_not_fit": str(error)})
            continue
        text = compiled.as_text()
        write_atomically(os.path.join(folder, f"{step}.hlo.gz"), gzip.compress(text.encode(), 4), durable=False)
        _write(folder, step, compiled_figures(program, compiled, text, step, accelerator))


def lower(program: Any, step: str) -> Any:
    """The program's own training or evaluation step, lowered for its devices."""
    if step == "train":
        return program.train_step.lower(*program.example())
    from lmtrain.hf.tokenizer import TextSizes

    # lengths of tokens in bytes are constants of the program; their values do not affect its figures
    lengths = [1 + token % 7 for token in range(program.model.vocab_size)]
    return program.eval_step(TextSizes(lengths)).lower(*program.eval_example())


def _write(folder: str, name: str, content: dict[str, Any]) -> None:
    write_atomically(os.path.join(folder, f"{name}.json"), json.dumps(content).encode(), durable=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
