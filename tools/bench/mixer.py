"""A mixer of positions, forward and backward, as compiled for one device that is not here: a layer of Gated
DeltaNet with the sizes of Qwen3-Next and 32,768 tokens, or the attention of latents with the sizes of DeepSeek-V2-Lite
and 4 sequences of 4,096 tokens, alone or in its layer.

    .venv-compiled/bin/python tools/bench/mixer.py delta | latent | latent_layer [--device KIND] [--xla]

Prints memory traffic and temporary memory. For a TPU also cycles (of a v5p): those that the compiler estimates outside
of kernels, and the bundles of instructions of the kernels, of which two cores execute one each at a time; peak: the
products of the projections at the device's highest rate. For a GPU the number of launches, and what the assembler
says of each kernel: registers of a thread, bytes that do not fit into them, and instructions of matrix units by kind.
With --xla, without kernels, or those of latents: the attention of keys that are joined.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from splash_blocks import ENVIRONMENT, bundles

CORES, CLOCK, RATE = 2, 1.75e9, 459e12


# Devices and the smallest topologies of them.
SHAPES = {"v5p": (2, 2, 1), "v5e": (2, 2), "v6e": (2, 2), "h100": (1,), "a100": (1,)}

GPUS = {"h100": "sm_90a", "a100": "sm_80"}

# Instructions of a compiled program that launch nothing.
NO_LAUNCH = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "iota",
    "after-all", "partition-id", "opt-barrier",
}  # fmt: skip


def open_device(kind: str) -> Any:
    """A device that is not here, as the one of this process."""
    from lmtrain.plan.request import Target
    from lmtrain.plan.worker import open_devices
    from lmtrain.sharding import local

    device = open_devices(Target(kind=kind, shape=SHAPES[kind]), True)[0]
    local._device = lambda: device
    return device


def delta_layer(kind: str, tokens: int, by_xla: bool, on: Any) -> tuple:
    """The layer as a function of parameters, input and segments, and its arguments."""
    import jax
    import jax.numpy as jnp

    from lmtrain.models.attention.kernel import Choice
    from lmtrain.models.gated_delta import devices
    from lmtrain.models.gated_delta.layer import GatedDelta
    from lmtrain.models.llama.config import LlamaConfig

    if by_xla:
        devices.choose_delta = lambda *needs: Choice("chunks", "")
    config = LlamaConfig(
        hidden_dim=2048, num_heads=16, num_layers=2, seq_len=tokens, layer_pattern=["linear", "full"],
        linear_attention={},
    )  # fmt: skip
    return of_layer(
        GatedDelta(config.of_kind(config.pattern[0])), jax.ShapeDtypeStruct((1, tokens, 2048), jnp.bfloat16), on
    )


def of_layer(layer: Any, x: Any, on: Any) -> tuple:
    """A layer as a function of parameters, input and segments, and its arguments, on the device."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from lmtrain.models.interface import Documents

    short = jax.ShapeDtypeStruct((1, 128, x.shape[2]), x.dtype)
    abstract = jax.eval_shape(lambda x: layer.init(jax.random.key(0), x, 0, True, Documents()), short)["params"]

    def computed(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_exact = path[-1].key in ("a_log", "dt_bias", "scale")
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if is_exact else jnp.bfloat16, sharding=on)

    params = jax.tree_util.tree_map_with_path(computed, nn.meta.unbox(abstract))
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on)

    def run(params: dict, x: jax.Array, segments: jax.Array) -> jax.Array:
        return layer.apply({"params": params}, x, 0, True, Documents(segments))

    return run, (params, x), jax.ShapeDtypeStruct(x.shape[:2], jnp.int32, sharding=on), x


def latent(kind: str, tokens: int, by_xla: bool, on: Any, has_layer: bool) -> tuple:
    """The attention of latents in four sequences, or its layer."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from lmtrain.models.attention import kernel, splash, triton
    from lmtrain.models.latent.layer import LatentAttention
    from lmtrain.models.llama.config import LlamaConfig

    name, module = ("triton", triton) if kind in GPUS else ("splash", splash)
    if by_xla:
        module.KERNEL = dataclasses.replace(module.KERNEL, latent=None)
    config = LlamaConfig(hidden_dim=2048, num_heads=16, num_layers=1, seq_len=tokens, latent_attention={})
    if has_layer:
        layer = LatentAttention(config.of_kind(config.pattern[0]), name)
        return of_layer(layer, jax.ShapeDtypeStruct((4, tokens, 2048), jnp.bfloat16), on)

    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((4, tokens, *sizes), jnp.bfloat16, sharding=on)

    def run(q: jax.Array, kv: jax.Array, shared: jax.Array, segments: jax.Array) -> jax.Array:
        q, kv = (x.transpose(0, 2, 1, 3) for x in (q, kv))
        mixed = kernel.self_attend_latent(name, q, kv, shared[:, None], config.score_scale, segments=segments)
        return mixed.transpose(0, 2, 1, 3)

    arguments = (array(16, 192), array(16, 256), array(64))
    return run, arguments, jax.ShapeDtypeStruct((4, tokens), jnp.int32, sharding=on), array(16, 128)


def compile_mixer(mixer: str, kind: str, tokens: int, by_xla: bool) -> None:
    """Compile it and print what the compiled text has."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from lmtrain.compiled.collectives import Network
    from lmtrain.compiled.executions import walk
    from lmtrain.compiled.figures import measure
    from lmtrain.compiled.hlo import parse_hlo

    on = SingleDeviceSharding(open_device(kind))
    if mixer == "delta":
        mix, arguments, segments, like = delta_layer(kind, tokens, by_xla, on)
    else:
        mix, arguments, segments, like = latent(kind, tokens, by_xla, on, mixer == "latent_layer")

    def run(arguments: tuple, segments: jax.Array, d_y: jax.Array) -> tuple:
        y, back = jax.vjp(lambda *given: mix(*given, segments), *arguments)
        return y, back(d_y)

    compiled = jax.jit(run).lower(arguments, segments, like).compile()
    text = compiled.as_text()
    found = measure(text, Network(mesh={}, slice_ids=[0]))
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**30
    print(f"HBM {found.hbm_bytes / 1e9:.1f} GB, temporary {temporary:.2f} GiB")
    if kind in GPUS:
        launched = (each for each in walk(parse_hlo(text))[0] if each.fusion is None)
        number = sum(each.times for each in launched if each.instruction.opcode not in NO_LAUNCH)
        print(
            f"{number:.0f} launches, {sum(call.times for call in found.kernels):.0f} of kernels and products",
            flush=True,
        )
        return
    peak = found.flops / RATE * CLOCK / 1e6
    print(f"outside of kernels {found.cycles / 1e6:.1f} M cycles, products at peak {peak:.1f} M", flush=True)


def assembled(folder: Path, architecture: str) -> None:
    """Assemble the kernels of a compiled program again, and print what the assembler says."""
    (assembler,) = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cuda_nvcc/bin/ptxas")
    for path in folder.glob("*.ptx"):
        text = path.read_text()
        command = [str(assembler), "-v", f"-arch={architecture}", str(path), "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for part in text.split(".visible .entry ")[1:]:
            name = part.partition("(")[0]
            if not name.startswith(("gated_delta", "attention_")):
                continue
            own = report.partition(f"Compiling entry function '{name}'")[2].partition("Compiling entry")[0]
            registers, spilled = (re.search(rf"(\d+) {what}", own) for what in ("registers", "bytes spill stores"))
            assert registers is not None, report
            assert spilled is not None, report
            kinds = {kind: part.count(f"{kind}.") for kind in ("wgmma.mma_async", "mma.sync")}
            warned = ", serialized" if re.search(f"serialized.*'{name}'", report) else ""
            print(f"{name}: {registers[1]} registers, {spilled[1]} bytes spilled, {kinds}{warned}")


def main() -> None:
    """The compiler of a process of its own writes the schedules of kernels to a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixer", choices=("delta", "latent", "latent_layer"), help="what mixes the positions")
    parser.add_argument("--device", default="v5p", choices=SHAPES, help="kind of device")
    parser.add_argument("--tokens", type=int, help="length of a sequence")
    parser.add_argument("--xla", action="store_true", help="without kernels")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.tokens = args.tokens or (32_768 if args.mixer == "delta" else 4096)
    if args.compile:
        compile_mixer(args.mixer, args.device, args.tokens, args.xla)
        return
    command = [sys.executable, __file__, "--compile", *sys.argv[1:]]
    environment = {**os.environ, **ENVIRONMENT}
    if args.device in GPUS:
        with tempfile.TemporaryDirectory() as folder:
            environment["XLA_FLAGS"] = f"--xla_dump_to={folder}"
            subprocess.run(command, env=environment, check=True)
            assembled(Path(folder), GPUS[args.device])
        return
    subprocess.run(command, env=environment, check=True)
    if args.mixer == "delta":
        if not args.xla:
            delta_kernels(command, environment, args.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment["LIBTPU_INIT_ARGS"] = flags
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        own = ("latent_attention_forward", "latent_attention_backward")
        found = {kernel: bundles(Path(folder), kernel) for kernel in (("fwd", "dq", "dkv") if args.xla else own)}
    print(f"bundles for a block of queries and one of keys: {found}, {sum(found.values())} together")


def delta_kernels(command: list[str], environment: dict[str, str], tokens: int) -> None:
    """Print the bundles of the kernels of Gated DeltaNet."""
    from lmtrain.models.gated_delta.config import CHUNK

    total, programs = 0.0, tokens // CHUNK * 16 / 2  # of two key heads of 16
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
