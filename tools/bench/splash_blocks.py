"""Instructions of the splash attention kernels for TPUs by block size, as the compiler schedules them, without a TPU.

    .venv-compiled/bin/python tools/bench/splash_blocks.py [TOPOLOGY] [--width 128] [--sizes 256,512,1024]

TOPOLOGY is by default v5e:2x2. One line for each block size: bundles of instructions for one block of queries and one
of keys in the forward kernel and the two of the backward pass, and their sum for each 512 x 512 scores. The default
blocks of `lmtrain/models/attention/splash.py` come from these figures.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = ("fwd", "dq", "dkv")
SIZES = "128,256,384,512,640,768,1024"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def compile_kernels(topology: str, block: int, width: int) -> None:
    """Compile the kernels of a sequence of four blocks for one device of the topology."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from lmtrain.models.attention import splash
    from lmtrain.models.attention.attend import Options

    splash.platform = lambda: "tpu"  # type: ignore[assignment]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    one = SingleDeviceSharding(device)
    heads = jax.ShapeDtypeStruct((1, 2, 4 * block, width), jnp.bfloat16, sharding=one)
    segments = jax.ShapeDtypeStruct((1, 4 * block), jnp.int32, sharding=one)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        options = Options(segments=segments, block_size=block)
        return splash.splash(q, k, v, 1.0, options).astype(jnp.float32).sum()

    jax.jit(jax.grad(loss, (0, 1, 2))).lower(heads, heads, heads, segments).compile()


def bundles(folder: Path, kernel: str) -> int:
    """The number of non-empty bundles in the kernel's final schedule."""
    (report,) = folder.glob(f"*{kernel}*schedule-analysis_final*")
    found = re.search(r"non empty scheduled bundles: (\d+)", report.read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    """Each size is compiled in a process of its own, whose compiler writes its schedules to a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", nargs="?", default="v5e:2x2")
    parser.add_argument("--width", type=int, default=128, help="width of a head")
    parser.add_argument("--sizes", default=SIZES, help="block sizes")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_kernels(args.topology, args.compile, args.width)
        return
    for block in map(int, args.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
            command = [sys.executable, __file__, args.topology, "--width", str(args.width), "--compile", str(block)]
            done = subprocess.run(
                command, env={**os.environ, **ENVIRONMENT, "LIBTPU_INIT_ARGS": dump}, capture_output=True, text=True
            )
            if done.returncode:
                print(f"{block}: does not compile: {done.stderr.strip().splitlines()[-1][:200]}")
                continue
            counts = [bundles(Path(folder), f"splash_mha_{kernel}") for kernel in KERNELS]
        each = ", ".join(f"{name} {count}" for name, count in zip(KERNELS, counts, strict=True))
        print(f"{block}: {each}; {sum(counts) * (512 / block) ** 2:.0f} for 512 x 512 scores", flush=True)


if __name__ == "__main__":
    main()
