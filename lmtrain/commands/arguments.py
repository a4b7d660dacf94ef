"""What the verbs' command lines have in common: CONFIG, overrides, and the loaded run."""

import argparse
from dataclasses import dataclass

from lmtrain.config.errors import UserError
from lmtrain.config.load import Loaded, load_config
from lmtrain.config.overrides import split_overrides
from lmtrain.config.suggest import suggest_name
from lmtrain.run_config import RunConfig, run_id


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a `UserError` like any other."""

    def __init__(self, verb: str, description: str):
        super().__init__(prog=f"lmtrain {verb}", description=description, allow_abbrev=False)

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn, and so do we: it raises
        raise UserError(f"{message}\n{self.format_usage().rstrip()}")


@dataclass(frozen=True)
class Run:
    """A verb's arguments, and the config they name."""

    arguments: argparse.Namespace
    loaded: Loaded[RunConfig]
    id: str

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


def parse_run(parser: Parser, argv: list[str]) -> Run:
    """Parse `CONFIG`, the verb's own flags, and `--section.field VALUE` overrides in any order."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file, URL, or name of a shipped config")
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " [--section.field VALUE ...]"
    own_flags = [flag for action in parser._actions for flag in action.option_strings]
    rest, overrides = split_overrides(argv, own_flags)
    for name, _ in overrides:
        hint = None if "." in name or name in RunConfig.model_fields else suggest_name(f"--{name}", own_flags)
        if hint:
            raise UserError(f"--{name}: no such flag; did you mean {hint}?")
    arguments = parser.parse_args(rest)
    loaded = load_config(RunConfig, arguments.config, overrides)
    return Run(arguments, loaded, run_id(loaded.config, loaded.stem))
