"""`lmtrain scaling run|status|fit|predict LADDER`: a ladder of small runs, and the loss and cost of a large one."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from lmtrain.commands.arguments import Parser, at_least
from lmtrain.config.load import LoadedConfig, find_config, load_config
from lmtrain.config.yaml_loader import load_file
from lmtrain.plan.known_models import find_vocab_size, teacher_config
from lmtrain.plan.request import Request, Target, ask
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import KINDS, find_topology
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.redact import redact
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.storage import write_atomically
from lmtrain.scaling.config import LadderConfig, as_overrides
from lmtrain.scaling.ladder import Ladder, build_ladder

if TYPE_CHECKING:
    from lmtrain.scaling.fitted import FittedLadder
    from lmtrain.scaling.points import Point
    from lmtrain.scaling.predict import Speed


def read_ladder(path: str, vocab_size: int | None) -> Ladder:
    """The ladder of a file, with the config that it names, relative to the file or as on the command line."""
    try:
        loaded = load_config(LadderConfig, path)
    except UserError:
        written = load_file(find_config(path)).data
        if "sizes" not in written and {"data", "model", "trainer"} & set(written):
            raise UserError(f"{path} is the config of a run, not a ladder, which has config and sizes") from None
        raise
    config = loaded.config.config
    here = os.path.join(os.path.dirname(loaded.path), config)
    near = [here + ending for ending in ("", ".yaml", ".yml") if os.path.isfile(here + ending)]
    try:
        found = near[0] if near else find_config(config)
    except UserError as error:
        raise UserError(f"{loaded.path}: config: {error}") from None
    try:
        base = load_config(RunConfig, found, as_overrides(loaded.config.overrides))
    except UserError as error:
        raise UserError(f"{loaded.path}: config with overrides: {error}") from None
    return build_ladder(loaded, base, find_vocab_size(base.config.data, vocab_size)[0])


def read_fit(ladder: Ladder) -> "FittedLadder":
    """The law of the runs of a ladder that are done."""
    from lmtrain.scaling.fitted import fit_ladder
    from lmtrain.scaling.results import read_results

    return fit_ladder(ladder, read_results(ladder), train_tokens(ladder.run))


def train_tokens(config: RunConfig) -> float | None:
    """Tokens that a run can read before its data repeats; None if the cache is not here or not complete.

    Of a mixture, a source of weight w repeats after its tokens / w.
    """
    from lmtrain.preprocess.prepare import find_caches

    try:
        caches = find_caches(config.data, validation=False).train
    except (UserError, OSError):  # the text may be on another machine
        return None
    if not all(cache.complete for cache in caches.values()):
        return None
    if config.data.configs is None:
        return float(sum(cache.shards.tokens for cache in caches.values()))
    changes = [weights for _, weights in config.data.weight_changes(list(caches))]
    shares = {name: max(weights.get(name, 0.0) / sum(weights.values()) for weights in changes) for name in caches}
    return min((cache.shards.tokens / shares[name] for name, cache in caches.items() if shares[name]), default=None)


def run(argv: list[str]) -> int:
    parser = Parser("scaling", "Train a ladder of small runs, fit a law to their losses, and predict a large run.")
    parser.add_argument(
        "action", choices=list(_ACTIONS), help="; ".join(f"{n}: {a.__doc__}" for n, a in _ACTIONS.items())
    )
    parser.add_argument("ladder", metavar="LADDER", help="YAML file of the ladder")
    parser.add_argument("--json", action="store_true", help="status, fit, predict: print only JSON to stdout")
    count = at_least(1)
    parser.add_argument("--vocab_size", type=count, metavar="N", help="vocabulary size, if the tokenizer is unknown")
    jobs = parser.add_argument_group("run")
    jobs.add_argument("--commands", action="store_true", help="print the commands of the runs instead of running them")
    jobs.add_argument("--only", metavar="ID", help="train this run only, once, in this process")
    jobs.add_argument("--slurm", metavar="DIR", help="write Slurm arrays of the runs and a script that submits them")
    big = parser.add_argument_group("predict")
    big.add_argument("--config", metavar="BIG", help="CONFIG of the large run (default: that of the ladder)")
    big.add_argument(
        "--device", metavar="KIND", help=f"kind of device, whose speed `plan` computes: {', '.join(KINDS)}"
    )
    big.add_argument("--devices", type=count, metavar="N", help="number of devices")
    big.add_argument("--topology", metavar="T", help="topology of TPUs, as for plan")
    big.add_argument("--hours", type=at_least(1e-6, float), metavar="H", help="find the best run for these hours")
    big.add_argument("--efficiency", type=_fraction, metavar="F", help="fraction of the plan's bound (default: 1)")
    big.add_argument("--mfu", type=_fraction, metavar="F", help="model FLOPs utilization, instead of a plan")
    big.add_argument("--run", metavar="ID", help="run of this speed, instead of a plan (default: the ladder's largest)")
    big.add_argument("--write", metavar="FILE", help="write the config of the best run")
    arguments = parser.parse_args(argv)
    _check_flags(arguments)
    return _ACTIONS[arguments.action](arguments)


def _run(arguments: argparse.Namespace) -> int:
    """train all runs that are not done"""
    from lmtrain.scaling.describe import few_sizes, rate_lines
    from lmtrain.scaling.fitted import MIN_SIZES, check_data
    from lmtrain.scaling.points import find_point, points, public_arguments
    from lmtrain.scaling.results import check, check_existing, read_results, stages
    from lmtrain.scaling.runner import remaining, shell_lines, train_all, write_arrays

    ladder = read_ladder(arguments.ladder, arguments.vocab_size)
    if len(ladder.sizes) < MIN_SIZES:
        print(f"{ladder.name}: {few_sizes(ladder)}", file=sys.stderr)
    law = points(ladder, ladder.rates[:1] * len(ladder.sizes))
    for point in law:  # errors of all runs before the first one
        ladder.load(point.settings, point.id)

    def data_is_enough() -> bool:
        available = train_tokens(ladder.run)
        check_data(ladder, [point.tokens for point in law], available)
        return available is not None

    if arguments.only is not None:
        return _train_one(ladder, find_point(ladder, arguments.only), data_is_enough)
    if not arguments.commands and arguments.slurm is None:
        return train_all(ladder, data_is_enough) or _status(arguments)
    data_is_enough()
    check_existing(ladder)
    results = check(read_results(ladder))
    remaining(ladder, results)
    lines, more = [[public_arguments(ladder, point) for point in stage] for stage in stages(results)], not results.law
    if not lines:
        print(f"{ladder.name}: all runs are done", file=sys.stderr)
        return 0
    for line in rate_lines(ladder, results):
        print(f"{ladder.name}: {line}", file=sys.stderr)
    if arguments.slurm is None:
        print("\n".join(shell_lines(lines, more)))
    else:
        script = write_arrays(arguments.slurm, ladder.name, lines, more)
        print(f"run: bash {shlex.quote(script)} [OPTIONS OF SBATCH]")
    return 0


def _train_one(ladder: "Ladder", point: "Point", data_is_enough: Callable[[], bool]) -> int:
    """Train one run in this process, as `lmtrain train`. -> its exit code"""
    from lmtrain.commands.train import run as train
    from lmtrain.scaling.points import arguments_of
    from lmtrain.scaling.results import Results, check, read_result
    from lmtrain.scaling.runner import check_start

    check(Results([], [read_result(ladder, point)]))
    data_is_enough()
    check_start(ladder, point)
    return train(arguments_of(ladder, point)[1:])


def _status(arguments: argparse.Namespace) -> int:
    """table of all runs"""
    from lmtrain.scaling.describe import status_json, status_lines
    from lmtrain.scaling.results import read_results

    ladder = read_ladder(arguments.ladder, arguments.vocab_size)
    results = read_results(ladder)
    print(json.dumps(status_json(results)) if arguments.json else "\n".join(status_lines(ladder, results)))
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    """fit the law"""
    from lmtrain.scaling.describe import fit_json, fit_lines

    fitted = read_fit(read_ladder(arguments.ladder, arguments.vocab_size))
    print(json.dumps(fit_json(fitted)) if arguments.json else "\n".join(fit_lines(fitted)))
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    """predict the loss and the cost of BIG, and with --hours the best run"""
    from lmtrain.scaling.describe import cost_line, effect_lines, fit_lines, prediction_json, prediction_lines
    from lmtrain.scaling.predict import check_config, predict, tokens_of, unknown_effects

    ladder = read_ladder(arguments.ladder, arguments.vocab_size)
    fitted = read_fit(ladder)
    big = ladder.base if arguments.config is None else load_config(RunConfig, arguments.config)
    config = big.config
    check_config(ladder, big.path, config)
    speed = _speed(arguments, fitted, config)
    lines = [*fit_lines(fitted), ""]
    answer: dict[str, Any] = {"speed": asdict(speed), "unidentified": fitted.fit.unidentified}
    if arguments.config is not None:
        prediction = predict(fitted, config.model, tokens_of(config))
        effects = unknown_effects(fitted, config, train_tokens(config))
        lines += [*effect_lines(effects), *prediction_lines(prediction), cost_line(prediction.flops, speed), ""]
        hours = speed.devices * speed.hours(prediction.flops)
        answer |= prediction_json(prediction) | {"device_hours": hours, "unknown_effects": effects}
    if arguments.hours is not None:
        found, answer["best"] = _best(arguments, fitted, big, speed)
        lines += found
    print(json.dumps(answer) if arguments.json else "\n".join(lines))
    return 0


def _best(
    arguments: argparse.Namespace, fitted: "FittedLadder", big: LoadedConfig[RunConfig], speed: "Speed"
) -> tuple[list[str], dict[str, Any]]:
    """The best run for --hours as text and as JSON; with --write also a config."""
    from lmtrain.scaling.describe import best_lines, cost_line, effect_lines, prediction_json
    from lmtrain.scaling.predict import best_run, repetitions

    ladder, title = fitted.ladder, "the best run for"
    overrides: Mapping[str, Any] = {}
    shape = big.config.model
    if arguments.config is None:
        overrides, shape = ladder.config.overrides, ladder.sizes[-1].model
    if arguments.write is not None:
        _check_output(arguments.write, title)
    best = best_run(fitted, big.config, shape, speed.flops(arguments.hours))
    load_config(RunConfig, big.path, as_overrides({**overrides, **best.settings}))  # as `config check` does
    effects = repetitions(best.prediction.tokens, train_tokens(big.config))
    lines = [*effect_lines(effects), *best_lines(best, speed, arguments.hours), cost_line(best.prediction.flops, speed)]
    answer = prediction_json(best.prediction) | {"range": list(best.range), "settings": dict(best.settings)}
    answer["size_interval"] = list(best.interval)
    answer["unknown_effects"] = effects
    if arguments.write is None:
        lines.append("settings  (--write FILE writes a config)")
        return lines + [f"  {name}: {json.dumps(value)}" for name, value in best.settings.items()], answer
    text = config_text(big.tree.data, best.settings, f"{title} {speed.devices} x {speed.device}, {arguments.hours:g} h")
    with remote_errors(f"--write {arguments.write}", "written"):
        write_atomically(arguments.write, text.encode())
    return [*lines, f"config    {arguments.write}"], answer


def _check_output(path: str, title: str) -> None:
    """Raise `UserError` if a file is there that this command has not written."""
    try:
        with open(path, encoding="utf-8") as file:
            ours = file.readline().startswith(f"# {title}")
    except (OSError, UnicodeDecodeError):
        ours = not os.path.exists(path)
    if not ours:
        raise UserError(f"--write {path}: this file exists; choose another name")


def _speed(arguments: argparse.Namespace, fitted: "FittedLadder", config: RunConfig) -> "Speed":
    """The speed of the devices: measured in a run, or by the plan of BIG."""
    from lmtrain.scaling.predict import Speed

    if arguments.device is None:
        return _measured_speed(arguments, fitted)
    target = Target.of(find_topology(arguments.device, arguments.topology, arguments.devices, None, 1))
    topology = target.topology
    assert topology is not None
    accelerator = topology.accelerator
    speed = partial(Speed, devices=topology.num_devices, device=accelerator.name)
    if arguments.mfu is not None:
        source = f"{100 * arguments.mfu:g} % MFU as given"
        return speed(flops_per_second=accelerator.peak_flops * arguments.mfu, source=source)
    if install := target.missing_compiler:
        raise UserError(f"--device {arguments.device}: its compiler is missing ({install}); install it, or add --mfu F")
    request = Request.of(config, fitted.ladder.vocab_size, target, ("train",), True, teacher_config(config))
    with Progress("plan", 1, bar=not arguments.json) as progress:
        plan = ask(request, 3600.0, partial(progress.update, 0))
    figures = plan.steps.get("train", {})
    if plan.failure or "mfu_bound" not in figures:
        reason = plan.failure or figures.get("does_not_fit", "no figures")
        raise UserError(
            f"--device {arguments.device}: no plan of this config, {reason.splitlines()[0]}; see `lmtrain plan`, or "
            "add --mfu F"
        )
    bound = accelerator.peak_flops * figures["mfu_bound"]
    efficiency = arguments.efficiency or 1.0
    source = f"{100 * efficiency:g} % of the plan's bound of {100 * figures['mfu_bound']:.1f} % MFU"
    return speed(flops_per_second=bound * efficiency, source=source)


def _measured_speed(arguments: argparse.Namespace, fitted: "FittedLadder") -> "Speed":
    """That of the run --run, else of the ladder's largest run, on this number of its devices."""
    from lmtrain.scaling.predict import Speed
    from lmtrain.scaling.results import read_speed

    log_dir = fitted.ladder.run.trainer.log_dir
    name = arguments.run or fitted.largest.point.id
    speed = read_speed(log_dir, name)
    return Speed(
        flops_per_second=speed.flops_per_second,
        devices=arguments.devices or speed.devices,
        device=speed.device,
        source=f"measured in {name}",
    )


def config_text(written: Mapping[str, Any], settings: Mapping[str, Any], title: str) -> str:
    """A config as written, with these settings, without secrets."""
    data = deepcopy(dict(written))
    for name, value in settings.items():
        *sections, last = name.split(".")
        section = data
        for part in sections:
            section[part] = section.get(part) or {}
            section = section[part]
        section[last] = value
    return f"# {title}\n{yaml.safe_dump(redact(data), sort_keys=False)}"


def _check_flags(arguments: argparse.Namespace) -> None:
    jobs = {"--commands": arguments.commands, "--slurm": arguments.slurm, "--only": arguments.only}
    if len(given := [flag for flag, value in jobs.items() if value]) > 1:
        raise UserError(f"{' and '.join(given)}: choose one")
    for action, flags in _FLAGS.items():
        for flag in flags if arguments.action != action else ():
            if getattr(arguments, flag) is not None and getattr(arguments, flag) is not False:
                raise UserError(f"--{flag}: is for `lmtrain scaling {action}`")
    if arguments.mfu is not None and arguments.efficiency is not None:
        raise UserError("--mfu is the utilization itself, --efficiency a fraction of the plan's bound; remove one")
    if arguments.hours is not None and arguments.hours > _MOST_HOURS:
        raise UserError(f"--hours {arguments.hours:g}: expected at most {_MOST_HOURS:g}")
    others = {"--topology": arguments.topology, "--mfu": arguments.mfu, "--efficiency": arguments.efficiency}
    if arguments.device is None and (name := next((name for name, value in others.items() if value is not None), None)):
        raise UserError(f"{name}: is for --device KIND")
    if arguments.device is not None and arguments.run is not None:
        raise UserError("--run is the speed of a run, --device that of a plan; remove one")
    if arguments.action == "predict" and arguments.config is None and arguments.hours is None:
        raise UserError("predict: add --config BIG for the loss of a config, or --hours H for the best run")
    if arguments.write is not None and arguments.hours is None:
        raise UserError("--write: needs --hours H, for which the best run is written")


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a fraction, above 0 and at most 1")
    return value


# Flags of one action.
_FLAGS = {
    "run": ("commands", "slurm", "only"),
    "predict": ("config", "device", "devices", "topology", "hours", "efficiency", "mfu", "run", "write"),
}
_MOST_HOURS = 1e6

_ACTIONS = {"run": _run, "status": _status, "fit": _fit, "predict": _predict}
