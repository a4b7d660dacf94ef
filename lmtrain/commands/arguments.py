"""The parts that all command lines share: CONFIG, overrides, and the loaded run."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from lmtrain.config.describe import describe, format_settings
from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer
from lmtrain.config.load import Loaded, load_config
from lmtrain.config.overrides import split_overrides
from lmtrain.config.suggest import suggest_name
from lmtrain.run.config import RunConfig
from lmtrain.run.identity import run_id
from lmtrain.run.run import Run

# Flags of the reference's programs that are settings in lmtrain.
_SYNONYMS = {name: f"trainer.ray.{name}" for name in ("address", "start_workers", "auto_start_cluster")}


class Parser(argparse.ArgumentParser):
    """argparse, with errors raised as `UserError`."""

    def __init__(self, verb: str, description: str, lists_settings: bool = False):
        self._lists_settings = lists_settings
        super().__init__(
            prog=f"lmtrain {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def format_help(self) -> str:
        """The help text; for commands that use all settings, followed by a list of these."""
        text = super().format_help()
        return f"{text}\n{format_settings(describe(RunConfig))}" if self._lists_settings else text

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.format_usage().rstrip()}")


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
    own_flags = [flag for action in parser._actions for flag in action.option_strings]
    rest, overrides = split_overrides(argv, own_flags)
    synonyms = _SYNONYMS | _short_names(short_for)
    overrides = [(synonyms.get(name, name), value) for name, value in overrides]
    for name, _ in overrides:
        hint = None if "." in name or name in RunConfig.model_fields else suggest_name(f"--{name}", own_flags)
        if hint:
            raise UserError(f"--{name}: no such flag; did you mean {hint}?")
    arguments = parser.parse_args(rest)
    configs = [path for path in [arguments.config, *(arguments.config_flags or [])] if path]
    if getattr(arguments, "run", None):
        if configs:
            raise UserError(f"--run {arguments.run}: has its own config; remove {configs[0]}")
        return arguments, _kept_run(arguments.run, overrides)
    if not configs and not needs_config(arguments):
        if overrides:
            raise UserError(f"--{overrides[0][0]}: is a setting of a CONFIG, but no CONFIG was given")
        return arguments, Run(Loaded(RunConfig(), Layer(), ""), "")
    if not configs:
        parser.error("the following arguments are required: CONFIG")
    if len(configs) > 1:
        raise UserError(f"expected one CONFIG, got {' and '.join(configs)}; use !include to combine files")
    path = configs[0]
    loaded = load_config(RunConfig, path, overrides)
    for notice in loaded.layer.notices:
        print(f"note: {notice}", file=sys.stderr)
    return arguments, Run(loaded, run_id(loaded.config, loaded.stem))


def add_run_flag(parser: Parser) -> None:
    parser.add_argument(
        "--run",
        metavar="ID",
        help="run id, or the folder of its logs; replaces CONFIG with the config that the run was started with",
    )


def add_checkpoint_flag(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        "--checkpoint_path",
        metavar="PATH",
        help="checkpoint to load: step folder, run folder or a parent of it (default: the config's own run)",
    )


def add_hf_flag(parser: Parser) -> None:
    parser.add_argument(
        "--hf", metavar="REF", help="Hugging Face model instead of a checkpoint: folder, URL, or id[@revision]"
    )


def _kept_run(name: str, overrides: list[tuple[str, str]]) -> Run:
    """The run with this id, or with this folder of logs."""
    name = name.rstrip("/")
    given = dict(overrides).get("trainer.log_dir", RunConfig().trainer.log_dir)
    places = [os.path.join(os.path.expanduser(parent), name) for parent in (given, "")]
    found = next((place for place in places if os.path.isfile(os.path.join(place, "config.yaml"))), None)
    if found is None:
        near = suggest_name(os.path.basename(name), _kept_runs(given))
        raise UserError(
            f"--run {name}: {places[0]}/config.yaml not found; "
            + (f"did you mean {near}?" if near else "set --trainer.log_dir to the folder of its logs")
        )
    loaded = load_config(RunConfig, os.path.join(found, "config.yaml"), overrides)
    return Run(loaded, os.path.basename(name), is_named=True)


def _kept_runs(log_dir: str) -> list[str]:
    folder = os.path.expanduser(log_dir)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [name for name in names if os.path.isfile(os.path.join(folder, name, "config.yaml"))]


def _short_names(section: str | None) -> dict[str, str]:
    if section is None:
        return {}
    fields = type(getattr(RunConfig(), section)).model_fields
    return {name: f"{section}.{name}" for name in fields if name not in RunConfig.model_fields}
