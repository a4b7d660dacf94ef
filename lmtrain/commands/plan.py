"""`lmtrain plan CONFIG`: memory, communication and speed on any devices, by their compilers; settings that fit."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import UserError
from lmtrain.plan import report
from lmtrain.plan.answers import Answer, ask, read_hlo
from lmtrain.plan.as_json import as_json
from lmtrain.plan.candidates import to_yaml
from lmtrain.plan.known_models import KNOWN_MODELS
from lmtrain.plan.request import STEPS, Request, Target
from lmtrain.plan.search import Search, Trial, find_settings, first_that_fits
from lmtrain.plan.vocabulary import find_vocab_size
from lmtrain.run.run import Found, Run, resolve
from lmtrain.runtime.accelerators import Accelerator, find_accelerator
from lmtrain.runtime.atomic_files import write_atomically
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.topologies import KINDS, find_topology
from lmtrain.train.start.hf_model import hf_ref, resolve_hf

_EXTRAS = {"tpu": "pip install 'lmtrain[tpu]'", "cuda12": "pip install 'lmtrain[cuda12]' (or cuda13)"}


def run(argv: list[str]) -> int:
    flags, run = parse_run(_parser(), argv, short_for="trainer")
    _check_flags(flags)
    _check_hlo(flags.hlo)
    run = _with_model_sizes(run)
    vocab_size, where = find_vocab_size(run.config.data, flags.vocab_size)
    target = _target(flags)
    extra = target.missing_extra
    if extra is not None and not flags.no_compile and not flags.search:
        _say(f"the compiler for {target.kind} is not installed ({_EXTRAS[extra]}); showing the estimate only")
    request = Request.of(run.config, vocab_size, target, _steps(flags), extra is None and not flags.no_compile)
    if flags.search or flags.measure:
        if not request.compile:
            raise UserError(
                f"--search requires the compiler of {target.kind}: {_EXTRAS.get(extra or '', 'remove --no_compile')}"
            )
        return _search(request, flags)
    return _plan(request, flags, f"{vocab_size:,} tokens, from {where}")


def _plan(request: Request, flags: Any, vocabulary: str) -> int:
    with _progress("plan", flags.json) as show:
        answer = ask(request, flags.compile_timeout, show)
    if answer.failure:
        _say(f"compiling failed; showing the estimate only:\n  {answer.failure.replace(chr(10), chr(10) + '  ')}")
    if flags.hlo is not None:
        text = read_hlo(request, request.steps[0])
        if text is None:
            raise UserError(f"--hlo {flags.hlo}: nothing was compiled, so there is no HLO text")
        write_atomically(flags.hlo, text.encode())
    accelerator = _accelerator(answer)
    capacity = report.capacity_of(accelerator)
    fits = answer.fits(capacity)
    largest = None
    if fits is False and request.compile and not answer.failure:
        with _progress("trying smaller settings", flags.json) as show:
            largest = first_that_fits(request.changed({}, steps=("train",)), capacity, flags.compile_timeout, show)
    if flags.json:
        found = as_json(request, answer, accelerator, fits)
        print(json.dumps(found | {"largest_that_fits": None if largest is None else dict(largest.changes)}))
    else:
        advice = [] if fits is not False else _advice(request, answer, largest)
        _print(answer, accelerator, request.target, vocabulary, advice)
    return 1 if fits is False else 0


def _steps(flags: Any) -> tuple[str, ...]:
    """The steps to compile or run. --hlo writes one step, by default training; a search compiles the training step."""
    if flags.measure:
        return ("measure",)
    if flags.step is not None:
        return (flags.step,)
    return ("train",) if flags.search or flags.hlo is not None else STEPS


def _check_flags(flags: Any) -> None:
    """Raise `UserError` for flags that would have no effect, or whose values are invalid."""
    if flags.device is None:
        for name, default in (("topology", None), ("hosts", None), ("slices", 1)):
            if getattr(flags, name) != default:
                raise UserError(f"--{name}: requires --device KIND; kinds: {', '.join(KINDS)}")
        if flags.devices is not None and flags.devices < 1:
            raise UserError(f"--devices: expected 1 or more, got {flags.devices}")
        if flags.search and not flags.measure:
            raise UserError("--search requires --device KIND, or --measure to run on this machine's devices")
    elif flags.measure:
        raise UserError("--measure runs on this machine's devices; remove --device")
    for name in ("minutes", "compile_timeout"):
        if not 0 < getattr(flags, name) < float("inf"):
            raise UserError(f"--{name}: expected a number above 0, got {getattr(flags, name):g}")
    for name in ("hlo", "step"):
        if (flags.search or flags.measure) and getattr(flags, name) is not None:
            raise UserError(
                f"--{name}: has no effect with --search or --measure; run plan again with the settings found"
            )


def _check_hlo(path: str | None) -> None:
    """Raise `UserError` for a file that cannot be written: before compiling rather than after."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise UserError(f"--hlo {path}: is a folder; expected a file")
    if not os.path.isdir(folder):
        raise UserError(f"--hlo {path}: folder {folder} not found; create it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"--hlo {path}: cannot be written; check its permissions")


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Compile the run's steps for any devices, present or not; report memory, FLOPs, memory traffic, communication "
        "and a bound on speed. Settings of the trainer may be given without their section: --model_axis_size 8. "
        "Exits with 1 if the run does not fit.",
    )
    parser.add_argument(
        "--device",
        metavar="KIND",
        help=f"{', '.join(KINDS)}, or Google's names (v5p-128); default: this machine's devices",
    )
    parser.add_argument("--topology", metavar="SHAPE", help="shape of a TPU slice in chips: 2x4, 4x4x4")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of devices (default: one GPU, or the smallest TPU host)"
    )
    parser.add_argument("--hosts", type=int, metavar="H", help="number of hosts of the GPUs (default: 8 GPUs per host)")
    parser.add_argument(
        "--slices",
        type=int,
        default=1,
        metavar="S",
        help="number of TPU slices, connected by the data center network (default: 1)",
    )
    parser.add_argument(
        "--vocab_size", type=int, metavar="N", help="vocabulary size in tokens, if the tokenizer is unknown"
    )
    parser.add_argument("--step", choices=STEPS, help="compile only this step")
    parser.add_argument("--json", action="store_true", help="print only JSON to stdout")
    parser.add_argument("--hlo", metavar="FILE", help="write the optimized HLO text of the step (default: train)")
    parser.add_argument("--no_compile", action="store_true", help="print only the memory estimate, without compiling")
    parser.add_argument("--search", action="store_true", help="search for the fastest settings that fit; prints YAML")
    parser.add_argument(
        "--measure", action="store_true", help="search by running a few steps on this machine's devices"
    )
    parser.add_argument(
        "--minutes", type=float, default=15.0, metavar="M", help="time limit of --search in minutes (default: 15)"
    )
    parser.add_argument(
        "--compile_timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="timeout of one compile in seconds (default: 600)",
    )
    return parser


def _target(flags: Any) -> Target:
    if flags.device is None:
        return Target(shape=() if flags.devices is None else (flags.devices,))
    return Target.of(find_topology(flags.device, flags.topology, flags.devices, flags.hosts, flags.slices))


def _with_model_sizes(run: Run) -> Run:
    """With `use_hf_model_config`, the sizes of a model in a local folder or of a known one; nothing is downloaded.

    With LoRA also the dtype of the base, for a model that is not here as published for its family.
    """
    ref = hf_ref(run.config)
    lora = run.config.lora
    is_here = os.path.exists(run.config.initialize_from_checkpoint_path or "") if ref is None else os.path.isdir(ref)
    if is_here and (lora is not None or run.config.use_hf_model_config):
        return resolve_hf(run, check_tokenizer=False)
    if ref is not None and run.config.use_hf_model_config:
        run = _with_known_sizes(run, ref)
    if lora is not None and lora.base_dtype is None:
        dtype = "bfloat16" if run.config.model.type in ("llama", "mpt") else "float32"
        run = resolve(run, Found("the dtype in which the family is published", {"lora": {"base_dtype": dtype}}))
    return run


def _with_known_sizes(run: Run, ref: str) -> Run:
    """Raises `UserError` for a model whose sizes are not known."""
    sizes = KNOWN_MODELS.get(ref.partition("@")[0])
    if sizes is None:
        raise UserError(
            f"use_hf_model_config: the sizes of {ref} are unknown without downloading it; add --use_hf_model_config "
            "false and write them into the model section, or set initialize_from_hf to a local folder"
        )
    given = run.config.model.model_dump(include=run.config.model.model_fields_set - {"type"})
    return resolve(run, Found(f"the known sizes of {ref}", {"model": sizes | given}))


def _accelerator(answer: Answer) -> Accelerator | None:
    return find_accelerator(answer.estimate["device"])


def _print(answer: Answer, accelerator: Accelerator | None, target: Target, vocabulary: str, advice: list[str]) -> None:
    estimate = answer.estimate
    topology = target.topology
    name = accelerator.name if accelerator else estimate["device"]
    device = f"{estimate['devices']} x {name}" + (
        f" ({topology.name})" if topology and topology.num_devices > 1 else ""
    )
    lines: list[str] = [*report.model_lines(estimate, device, vocabulary), ""]
    lines += report.estimate_lines(estimate)
    for figures in answer.steps.values():
        lines += report.step_lines(figures, estimate, accelerator)
    lines += ["", report.verdict(answer, accelerator), *advice]
    print("\n".join(lines))


def _advice(request: Request, answer: Answer, largest: Trial | None) -> list[str]:
    """Advice if the run does not fit: the largest setting that was found to fit, and what the estimate suggests."""
    lines, advice = [], answer.estimate["advice"]
    if largest is not None:
        advice = [line for line in advice if not line.startswith("trainer.per_device_parallelism")]
        lines.append(f"largest that fits ({largest.peak / 2**30:.2f} GiB by the compiler): {largest.name}")
        lines += [f"  {line}" for line in to_yaml(largest.changes)]
    elif request.compile and not answer.failure:
        lines.append(
            "no value of per_device_parallelism and gradient_checkpointing fits these devices; use more devices"
        )
    return [*lines, "what to reduce, most effective first:", *(f"  {line}" for line in advice)]


def _search(request: Request, flags: Any) -> int:
    found = Search()
    with _progress("search", flags.json) as show:
        first = ask(request.changed({}, compile=False), flags.compile_timeout, show)
        accelerator = _accelerator(first)
        capacity = report.capacity_of(accelerator)
        request = replace(request, target=replace(request.target, found=first.estimate["devices"]))
        if _has_dropout(request):
            _say("note: dropout draws other random numbers if the number of microbatches changes")
        try:
            find_settings(request, capacity, flags.minutes, flags.compile_timeout, _say, show, found)
        except KeyboardInterrupt:
            _say("interrupted; showing the results so far")
    return _print_search(found, flags.json)


def _has_dropout(request: Request) -> bool:
    model = request.config["model"]
    return any(model.get(name) for name in ("embed_pdrop", "resid_pdrop", "attn_pdrop"))


def _print_search(found: Search, json_only: bool) -> int:
    best = found.best
    if json_only:
        trials = [{"name": t.name, "changes": dict(t.changes), "seconds": _finite(t.seconds), "peak": _finite(t.peak),
                   "fits": t.fits} for t in found.trials]  # fmt: skip
        chosen = None if best is None else dict(best.changes)
        print(json.dumps({"best": chosen, "trials": trials, "too_large": found.too_large, "untried": found.untried}))
        return 0 if best is not None else 1
    if best is None:
        print(
            f"no settings fit: {len(found.trials)} tried, {found.too_large} too large by the estimate; use more devices"
        )
        return 1
    print(f"# best of {len(found.trials)} tried: {best.seconds:.4g} s per step, {best.peak / 2**30:.2f} GiB per device")
    print(f"# {found.too_large} were too large by the estimate, {found.untried} were not tried before the time limit")
    for line in to_yaml(best.changes) or ["# the config unchanged"]:
        print(line)
    for line in _costs(found, best):
        print(f"# {line}")
    return 0


def _costs(found: Search, best: Trial) -> Iterator[str]:
    """Time and memory of the trials that differ from the best in one setting, relative to the best."""
    for trial in found.trials:
        names = {name for name in {*trial.changes, *best.changes} if trial.changes.get(name) != best.changes.get(name)}
        sections = {name for name in names if name not in ("trainer.tensor_parallel_axes",)}
        if trial is best or len(sections) != 1 or trial.seconds == float("inf"):
            continue
        yield (
            f"{trial.name}: {trial.seconds / best.seconds:.2f} x the time, "
            f"{trial.peak / best.peak:.2f} x the memory{'' if trial.fits else ', does not fit'}"
        )


def _finite(number: float) -> float | None:
    return number if number == number and abs(number) != float("inf") else None


@contextmanager
def _progress(label: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    with Progress(label, 1, bar=not quiet) as progress:
        yield lambda text: progress.update(0, text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
