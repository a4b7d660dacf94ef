"""`lmtrain plan CONFIG`: memory, communication and speed on any devices, by their compilers; settings that fit."""

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial

from lmtrain.commands.arguments import Parser, at_least, parse_run
from lmtrain.plan import candidates, report
from lmtrain.plan.known_models import find_vocab_size, teacher_config, with_model_sizes
from lmtrain.plan.request import STEPS, Request, Target, ask, read_hlo
from lmtrain.plan.search import Search
from lmtrain.runtime.accelerators import KINDS, find_accelerator, find_topology
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError
from lmtrain.runtime.storage import write_atomically


def run(argv: list[str]) -> int:
    flags, run = parse_run(_parser(), argv, short_for="trainer")
    _check_flags(flags)
    run = with_model_sizes(run)
    vocab_size, where = find_vocab_size(run.config.data, flags.vocab_size)
    target = Target(shape=() if flags.devices is None else (flags.devices,))
    if flags.device is not None:
        target = Target.of(find_topology(flags.device, flags.topology, flags.devices, flags.hosts, flags.slices or 1))
    install, searches = target.missing_compiler, flags.search or flags.measure
    if searches and (install or flags.no_compile):
        raise UserError(f"--search requires the compiler of {target.kind}: {install or 'remove --no_compile'}")
    if install and not flags.no_compile:
        _say(f"the compiler for {target.kind} is not installed ({install}); showing the training state only")
    # a search compiles one step, and --hlo writes one
    steps = STEPS if flags.step is None and flags.hlo is None and not searches else (flags.step or "train",)
    steps = ("measure",) if flags.measure else steps
    teacher = teacher_config(run.config)
    request = Request.of(run.config, vocab_size, target, steps, not install and not flags.no_compile, teacher)
    try:
        if searches:
            return _search(request, flags)
        return _plan(request, flags, f"{vocab_size:,} tokens, from {where}")
    except StoppedError:
        _say("stopped; run the same command again: the programs that have been compiled are kept")
        return STOPPED_BY_SIGNAL


def _plan(request: Request, flags: argparse.Namespace, vocabulary: str) -> int:
    with Progress("plan", 1, bar=not flags.json) as progress:
        plan = ask(request, flags.compile_timeout, partial(progress.update, 0))
        comparison = candidates.compare(request, plan, flags.compile_timeout, partial(progress.update, 0))
    if plan.failure:
        _say("\n  ".join(["compiling failed; figures of a compiled step are missing:", *plan.failure.splitlines()]))
    if flags.hlo is not None:
        text = read_hlo(request, request.steps[0])
        if text is None:
            raise UserError(f"--hlo {flags.hlo}: nothing was compiled, so there is no HLO text")
        write_atomically(flags.hlo, text.encode())
    accelerator = find_accelerator(plan.program["device"])
    capacity = report.capacity_of(accelerator)
    fits, smaller = plan.fits(capacity), None
    if fits is False and request.compile and not plan.failure:
        with Progress("trying smaller settings", 1, bar=not flags.json) as progress:
            training = request.changed({}, steps=("train",))
            smaller = Search(
                request=training, capacity=capacity, timeout=flags.compile_timeout, progress=partial(progress.update, 0)
            )
            smaller.largest_that_fits()
    if flags.json:
        changes = None if smaller is None or smaller.best is None else dict(smaller.best.changes)
        print(
            json.dumps(
                report.as_json(plan, accelerator, request.target)
                | {"largest_that_fits": changes, "eight_bit": comparison}
            )
        )
    else:
        print("\n".join(report.plan_lines(plan, accelerator, request.target, vocabulary, comparison)))
        if fits is False:
            print("\n".join(report.advice_lines(plan, smaller)))
    return 1 if fits is False else 0


def _search(request: Request, flags: argparse.Namespace) -> int:
    is_stopped = False
    with Progress("search", 1, bar=not flags.json) as progress:
        show = partial(progress.update, 0)
        program = ask(request.changed({}, compile=False), flags.compile_timeout, show).program
        request = replace(request, target=replace(request.target, local=program["devices"]))
        if any(request.config["model"].get(name) for name in ("embed_pdrop", "resid_pdrop", "attn_pdrop")):
            _say("note: dropout draws other random numbers if the number of microbatches changes")
        accelerator = find_accelerator(program["device"])
        products = candidates.format_for(accelerator) if flags.allow_quantization else None
        if flags.allow_quantization and products is None:
            _say(f"note: products in 8 bits save no time on {accelerator.name if accelerator else program['device']}")
        search = Search(
            request=request,
            capacity=report.capacity_of(accelerator),
            timeout=flags.compile_timeout,
            report=_say,
            progress=show,
            eight_bit=products,
        )
        try:
            search.run(flags.minutes)
        except StoppedError:
            is_stopped = True
            _say("stopped; showing the results so far")
    print(json.dumps(report.search_json(search)) if flags.json else "\n".join(report.search_lines(search)))
    return STOPPED_BY_SIGNAL if is_stopped else 0 if search.best is not None else 1


def _check_flags(flags: argparse.Namespace) -> None:
    """Raise `UserError` for flags that would have no effect."""
    if flags.device is None:
        for name in ("topology", "hosts", "slices"):
            if getattr(flags, name) is not None:
                raise UserError(f"--{name}: requires --device KIND; kinds: {', '.join(KINDS)}")
        if flags.search and not flags.measure:
            raise UserError("--search requires --device KIND, or --measure to run on this machine's devices")
    elif flags.measure:
        raise UserError("--measure runs on this machine's devices; remove --device")
    if flags.allow_quantization and not (flags.search or flags.measure):
        raise UserError("--allow_quantization: is a choice of --search; to plan 8-bit products, set trainer.mp")
    for name in ("hlo", "step"):
        if (flags.search or flags.measure) and getattr(flags, name) is not None:
            raise UserError(f"--{name}: has no effect with --search or --measure; plan the settings found afterwards")


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Compile the run's steps for any devices, present or not; report memory, FLOPs, memory traffic, communication "
        "and a bound on speed. Settings of the trainer may be given without their section: --model_axis_size 8. "
        "Exits with 1 if the run does not fit.",
    )
    add, count, kinds = parser.add_argument, at_least(1), ", ".join(KINDS)
    add("--device", metavar="KIND", help=f"{kinds}, or Google's names (v5p-128); default: this machine's devices")
    add("--topology", metavar="SHAPE", help="shape of a TPU slice in chips: 2x4, 4x4x4")
    add("--devices", type=count, metavar="N", help="number of devices (default: one GPU, or the smallest TPU host)")
    add("--hosts", type=count, metavar="H", help="number of hosts of the GPUs (default: 8 GPUs per host)")
    add("--slices", type=count, metavar="S", help="number of TPU slices, connected by DCN (default: 1)")
    add("--vocab_size", type=count, metavar="N", help="vocabulary size in tokens, if the tokenizer is unknown")
    add("--step", choices=STEPS, help="compile only this step")
    add("--json", action="store_true", help="print only JSON to stdout")
    add("--hlo", type=_new_file, metavar="FILE", help="write the step's optimized HLO text (default: train)")
    add("--no_compile", action="store_true", help="print only the memory of the training state, without compiling")
    add("--search", action="store_true", help="search for the fastest settings that fit; prints YAML")
    add("--measure", action="store_true", help="search by running a few steps on this machine's devices")
    add(
        "--allow_quantization",
        "--allow-quantization",
        action="store_true",
        help="--search may try products in 8 bits, which change what the run learns",
    )
    minutes, timeout = "time limit of --search (default: 15)", "seconds for one compile at most (default: 600)"
    add("--minutes", type=at_least(0.01, float), default=15.0, metavar="M", help=minutes)
    add("--compile_timeout", type=at_least(1, float), default=600.0, metavar="S", help=timeout)
    return parser


def _new_file(path: str) -> str:
    """A file that can be written: checked before compiling rather than after."""
    if os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: expected a file in a folder that exists and can be written")
    return path


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
