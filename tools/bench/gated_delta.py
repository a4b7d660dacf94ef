"""A layer of Gated DeltaNet with the sizes of Qwen3-Next, forward and backward, as compiled for one v5p, without a TPU.

    .venv-compiled/bin/python tools/bench/gated_delta.py [--tokens 32768] [--xla]

Prints memory traffic, temporary memory, and cycles: those that the compiler estimates outside of kernels, and the
bundles of instructions of the kernels, of which two cores execute one each at a time. Peak: the products of the
projections at the device's highest rate. With --xla, the layer without kernels.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from splash_blocks import ENVIRONMENT, bundles

CORES, CLOCK, RATE = 2, 1.75e9, 459e12


def compile_layer(tokens: int, by_xla: bool) -> None:
    """Compile the layer and print what the compiled text has."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from lmtrain.compiled.collectives import Network
    from lmtrain.compiled.figures import measure
    from lmtrain.models.gated_delta import layer as module
    from lmtrain.models.interface import Documents
    from lmtrain.models.llama.config import LlamaConfig
    from lmtrain.sharding import local

    device = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]
    local._device = lambda: device
    if by_xla:
        module.has_kernel = lambda: False  # type: ignore[assignment]
    config = LlamaConfig(
        hidden_dim=2048, num_heads=16, num_layers=2, seq_len=tokens, layer_pattern=["linear", "full"],
        linear_attention={},
    )  # fmt: skip
    layer, on = module.GatedDelta(config.of_kind(config.pattern[0])), SingleDeviceSharding(device)
    short = jax.ShapeDtypeStruct((1, 128, 2048), jnp.bfloat16)
    abstract = jax.eval_shape(lambda x: layer.init(jax.random.key(0), x, 0, True, Documents()), short)["params"]

    def computed(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_exact = path[-1].key in ("a_log", "dt_bias", "scale")
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if is_exact else jnp.bfloat16, sharding=on)

    params = jax.tree_util.tree_map_with_path(computed, nn.meta.unbox(abstract))
    x = jax.ShapeDtypeStruct((1, tokens, 2048), jnp.bfloat16, sharding=on)
    segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=on)

    def run(params: dict, x: jax.Array, segments: jax.Array, d_y: jax.Array) -> tuple:
        documents = Documents(segments)
        y, back = jax.vjp(lambda p, x: layer.apply({"params": p}, x, 0, True, documents), params, x)
        return y, back(d_y)

    compiled = jax.jit(run).lower(params, x, segments, x).compile()
    found = measure(compiled.as_text(), Network(mesh={}, slice_ids=[0]))
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**30
    peak = found.flops / RATE * CLOCK / 1e6
    print(f"HBM {found.hbm_bytes / 1e9:.1f} GB, temporary {temporary:.2f} GiB")
    print(f"outside of kernels {found.cycles / 1e6:.1f} M cycles, products at peak {peak:.1f} M", flush=True)


def main() -> None:
    """The compiler of a process of its own writes the schedules of kernels to a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="length of the sequence")
    parser.add_argument("--xla", action="store_true", help="without kernels")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_layer(args.tokens, args.xla)
        return
    command = [sys.executable, __file__, "--compile", *sys.argv[1:]]
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run(command, env=environment, check=True)
    if args.xla:
        return
    from lmtrain.models.gated_delta.config import CHUNK

    total, programs = 0.0, args.tokens // CHUNK * 16 / 2  # of two key heads of 16
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        short = [*command, "--tokens", "512"]  # the schedules of long products fill the disk
        subprocess.run(short, env={**environment, "LIBTPU_INIT_ARGS": flags}, check=True, stdout=subprocess.DEVNULL)
        for kernel in ("forward", "backward"):
            number = bundles(Path(folder), f"gated_delta_{kernel}")
            total += number * programs / CORES
            print(f"{kernel} kernel: {number} bundles for a chunk of two key heads")
    print(f"kernels: {total / 1e6:.1f} M cycles")


if __name__ == "__main__":
    main()
