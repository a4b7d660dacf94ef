"""The parts that all command lines share: CONFIG, overrides, the loaded run, and numbers of flags."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from glob import glob
from typing import Any, NoReturn

from lmtrain.config.describe import SECTIONS, describe, format_settings
from lmtrain.config.load import LoadedConfig, canonical, load_config, split_overrides
from lmtrain.config.section import problem_of_text
from lmtrain.config.spellings import other_names
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run, fill_masked, run_id
from lmtrain.runtime.errors import UserError, suggest_name
from lmtrain.runtime.redact import find_masked, redact

# Flags of the reference's programs that are settings in lmtrain.
_SYNONYMS = {name: f"trainer.ray.{name}" for name in ("address", "start_workers", "auto_start_cluster")}

_MAX_LISTED = 10

# Metavars of arguments that are neither names nor paths: `$` and braces are ordinary characters in them.
_TEXTS = (None, "TEXT", "TEMPLATE", "TOKEN,...")


class Parser(argparse.ArgumentParser):
    """argparse, with errors raised as `UserError`. `-` and `_` are the same in flags. For commands that use all
    settings, `--help` lists their sections, and `--help SECTION` the settings of one."""

    def __init__(self, verb: str, description: str, lists_settings: bool = False):
        self.lists_settings = lists_settings
        super().__init__(
            prog=f"lmtrain {verb}",
            description=description,
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        more = ", and the settings of a SECTION" if lists_settings else ""
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?" if lists_settings else 0,
            metavar="SECTION",
            help=f"show this help{more}",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and refuse names, paths and URLs that cannot be meant."""
        flags = {canonical(flag): flag for flag in self.flags}
        given = [argument.partition("=") for argument in (sys.argv[1:] if args is None else args)]
        args = [flags.get(canonical(name), name) + equals + value for name, equals, value in given]
        parsed, rest = super().parse_known_args(args, namespace)
        self._check_texts(parsed)
        return parsed, rest

    @property
    def flags(self) -> list[str]:
        """All flags, in every spelling."""
        return [flag for action in self._actions for flag in action.option_strings]

    def _check_texts(self, arguments: Any) -> None:
        """Raise `UserError` for a name, path or URL that cannot be meant."""
        for action in self._actions:
            values = getattr(arguments, action.dest, None)
            for text in values if isinstance(values, list) else [values]:
                if action.metavar not in _TEXTS and isinstance(text, str) and (problem := problem_of_text(text)):
                    raise UserError(f"{'/'.join(action.option_strings) or action.metavar}: {problem}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.format_usage().rstrip()}")


class _Help(argparse.Action):
    """Print the help, or the settings of a section, and exit."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        text = "" if values else parser.format_help()
        if parser.lists_settings:
            text += ("" if values else "\n") + format_settings(describe(RunConfig), values or SECTIONS)
        print(text, end="")
        parser.exit()


def parse_run(
    parser: Parser,
    argv: list[str],
    needs_config: Callable[[argparse.Namespace], bool] = lambda arguments: True,
    short_for: str | None = None,
) -> tuple[argparse.Namespace, Run]:
    """Parse CONFIG, the command's own flags, and `--section.field VALUE` overrides in any order; print notices.

    Settings of the section `short_for` may be given without it: `--field VALUE`.
    Where `needs_config(arguments)` is false, CONFIG may be missing: all settings then have their defaults, and
    `path` is empty.
    """
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file, URL, or name of a shipped config")
    parser.add_argument(
        "--config_path", "--config", dest="config_flags", action="append", metavar="CONFIG", help="CONFIG as a flag"
    )
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " [--section.field VALUE ...]"
    own_flags = parser.flags
    rest, overrides = split_overrides(argv, own_flags)
    synonyms = _SYNONYMS | _short_names(short_for)
    overrides = [(synonyms.get(name, name), value) for name, value in overrides]
    for name, _ in overrides:
        is_known = "." in name or name in RunConfig.model_fields or name in other_names("settings")
        hint = None if is_known else suggest_name(f"--{name}", own_flags)
        if hint:
            raise UserError(f"--{name}: no such flag; did you mean {hint}?")
    arguments = parser.parse_args(rest)
    configs = [path for path in [arguments.config, *(arguments.config_flags or [])] if path is not None]
    if getattr(arguments, "run", None):
        return arguments, _kept_run(arguments.run, overrides, configs)
    if not configs and not needs_config(arguments):
        if overrides:
            raise UserError(f"--{overrides[0][0]}: is a setting of a CONFIG, but no CONFIG was given")
        return arguments, Run(LoadedConfig(RunConfig()), "")
    if not configs:
        parser.error("the following arguments are required: CONFIG")
    if len(configs) > 1:
        raise UserError(f"expected one CONFIG, got {' and '.join(configs)}; use !include to combine files")
    loaded = fill_masked(load_config(RunConfig, configs[0], overrides))
    for notice in loaded.tree.notices:
        print(f"note: {redact(notice)}", file=sys.stderr)
    return arguments, Run(loaded, run_id(loaded.config, loaded.stem))


def _kept_run(name: str, overrides: list[tuple[str, str]], configs: list[str]) -> Run:
    """The run with this id, or with this folder of logs; `configs` are those on the command line, for its secrets."""
    name = name.rstrip("/")
    given = dict(overrides).get("trainer.log_dir", RunConfig().trainer.log_dir)
    folders = [os.path.join(os.path.expanduser(parent), name) for parent in (given, "")]
    folder = next((folder for folder in folders if os.path.isfile(os.path.join(folder, "config.yaml"))), None)
    if folder is None:
        parent = os.path.expanduser(given)
        runs = sorted(
            os.path.basename(os.path.dirname(path)) for path in glob(os.path.join(parent, "*", "config.yaml"))
        )
        near = suggest_name(os.path.basename(name), runs)
        advice = f"did you mean {near}?" if near else "set --trainer.log_dir to the folder of its logs"
        listed = f"; runs in {given}: {', '.join(runs)}" if 0 < len(runs) <= _MAX_LISTED else ""
        raise UserError(f"--run {name}: {folders[0]}/config.yaml not found; {advice}{listed}")
    loaded = load_config(RunConfig, os.path.join(folder, "config.yaml"), overrides)
    if configs and not find_masked(loaded.tree.data):
        raise UserError(f"--run {name}: has its own config; remove {configs[0]}")
    started_with = load_config(RunConfig, configs[0]).config if configs else None
    return Run(fill_masked(loaded, started_with), os.path.basename(name), is_named=True)


def _short_names(section: str | None) -> dict[str, str]:
    if section is None:
        return {}
    fields = type(getattr(RunConfig(), section)).model_fields
    return {name: f"{section}.{name}" for name in fields if name not in RunConfig.model_fields}


def at_least(minimum: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Type of a flag: a finite number of this kind, `minimum` or more."""

    def parse(text: str) -> float:
        value = kind(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected {minimum} or more")
        return value

    parse.__name__ = getattr(kind, "__name__", "number")  # of argparse's message for text that is not a number
    return parse


def add_model_flags(parser: Parser, hf: bool = True) -> None:
    """Add the flags that name a model: a checkpoint of a run or, with `hf`, a Hugging Face model."""
    add = parser.add_argument
    add(
        "--run",
        metavar="ID",
        help="run id, or the folder of its logs; replaces CONFIG with the config that the run was started with, except "
        "for secrets, which are not saved: where they are needed, add CONFIG",
    )
    add(
        "--checkpoint",
        "--checkpoint_path",
        metavar="PATH",
        help="checkpoint to load: step folder, run folder or a parent of it (default: the config's own run)",
    )
    add(
        "--average",
        metavar="N|A,B,...",
        help="average of the last N permanent checkpoints, or of a list of steps or checkpoints",
    )
    if hf:
        add("--hf", metavar="REF", help="Hugging Face model instead of a checkpoint: folder, URL, or id[@revision]")


def check_model_flags(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for two models."""
    if arguments.hf is None:
        return
    for flag in ("checkpoint", "average"):
        if getattr(arguments, flag) is not None:
            raise UserError(f"--hf and --{flag}: choose one")
