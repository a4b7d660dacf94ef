"""`lmtrain plan CONFIG`: parameters, FLOPs, layout and memory of a run, on the devices here or on others, before it."""

import os
from collections import Counter
from typing import TYPE_CHECKING

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import UserError
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.prepare_demo import missing_demo_tokenizer
from lmtrain.run_config import RunConfig
from lmtrain.runtime.logging import start_console_log
from lmtrain.train.devices import NAMES, Device, find_device

if TYPE_CHECKING:
    from lmtrain.train.program import Program

# An allocator cannot use all there is: fragments, kernels' work space, the driver.
_USABLE = 0.92


def run(argv: list[str]) -> int:
    parser = Parser(
        "plan",
        "Say what a run needs, and whether it fits, without running it. Settings of the trainer may be given without "
        "their section: --model_axis_size 8. Exits with 1 if it does not fit.",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="plan for so many devices (default: those here)")
    parser.add_argument("--device", choices=NAMES, metavar="KIND", help=f"of this kind: {', '.join(NAMES)}")
    parser.add_argument("--no_compile", action="store_true", help="leave out compiling the step for them")
    run = parse_run(parser, argv, short_for="trainer")
    arguments, config = run.arguments, run.config
    if missing_demo_tokenizer(config.data):
        missing = config.data.tokenizer
        raise UserError(f"{missing} is not made yet, and the vocabulary is in it; `lmtrain preprocess` makes it")
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)
    start_console_log()
    if arguments.devices is not None:
        _pretend(arguments.devices)

    # only now: JAX looks at the environment when it is imported
    import jax

    from lmtrain.train.program import plan_program

    program = plan_program(config, tokenizer.vocab_size)
    kind = arguments.device or ("" if arguments.devices else jax.devices()[0].device_kind)
    device = find_device(kind)
    _print_model(program)
    fits = _print_memory(program, device)
    if not arguments.no_compile:
        _print_collectives(program)
    return 0 if fits else 1


def _pretend(devices: int) -> None:
    if devices < 1:
        raise UserError("--devices: expected 1 or more")
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"


def _print_model(program: "Program") -> None:
    from lmtrain.train.layout_table import layout_table
    from lmtrain.train.state import count_parameters

    config: RunConfig = program.config
    model, trainer = config.model, config.trainer
    full, causal = program.flops_per_token
    mesh = " x ".join(f"{name} {size}" for name, size in program.layout.mesh.shape.items())
    print(f"model       {model.type}, {count_parameters(program.model):,} parameters")
    print(f"precision   {trainer.precision}")
    print(f"devices     {program.layout.mesh.size}: {mesh}")
    for batch, parts in program.batching.num_microbatches.items():
        on_each = batch // program.layout.num_batch_shards
        micro = f", in {parts} microbatches of {on_each // parts}" if parts > 1 else ""
        print(f"batch       {batch} sequences of {model.seq_len} tokens, {on_each} on each part of the mesh{micro}")
        print(f"FLOPs       {full * batch * model.seq_len:.3g} a step")
    print(f"            {full:.4g} a token, forward and backward; {causal:.4g} with causal attention counted as half")
    print("\nparameters, what they are split over, and their size on each device")
    for line in layout_table(program.model, program.layout, trainer.precision.params):
        print(f"  {line}")


def _print_memory(program: "Program", device: Device | None) -> bool:
    """Whether it fits, or nobody knows."""
    from lmtrain.runtime.progress import format_bytes

    memory = program.memory
    print("\nmemory of each device")
    for name, size in memory.state.items():
        print(f"  {name:<26}{format_bytes(size):>12}   exact")
    for name, size in memory.work.items():
        print(f"  {name:<26}{format_bytes(size):>12}   estimate, while a step runs")
    print(f"  {'total':<26}{format_bytes(memory.total):>12}")
    if device is None:
        print("whether it fits: name a kind of device, as in --device h100")
        return True
    usable = _USABLE * device.memory
    of = f"{format_bytes(usable)}, {100 * _USABLE:.0f} % of a {device.name}"
    if memory.total <= usable:
        print(f"fits: {100 * memory.total / usable:.0f} % of {of}")
        return True
    print(f"does not fit: {memory.total / usable:.1f} times {of}. What to turn down, what helps most first:")
    for line in program.advice():
        print(line)
    return False


def _print_collectives(program: "Program") -> None:
    """Compile the step for these devices, without any arrays: it partitions, or this raises."""
    from lmtrain.runtime.progress import format_bytes
    from lmtrain.sharding.collectives import find_collectives

    compiled = program.compile()
    found = find_collectives(compiled.as_text())
    counts = Counter(collective.kind for collective in found)
    print(f"\nthe step compiles for these {program.layout.mesh.size} devices (XLA's CPU backend)")
    for kind, count in sorted(counts.items()):
        sizes = [collective.bytes for collective in found if collective.kind == kind]
        print(f"  {count:>4} {kind:<20} results of up to {format_bytes(max(sizes))}; those in loops run many times")
    if not counts:
        print("  no collectives")
    print(f"  XLA's own figure for what comes and goes: {format_bytes(compiled.memory_analysis().temp_size_in_bytes)}")
