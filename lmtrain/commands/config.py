"""`lmtrain config check|show CONFIG`: validate a config, or print it resolved."""

import yaml

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import UserError


def run(argv: list[str]) -> int:
    actions = {"check": _check, "show": _show}
    if argv and argv[0] in ("-h", "--help"):
        print("usage: lmtrain config check|show CONFIG [--section.field VALUE ...]")
        return 0
    if not argv or argv[0] not in actions:
        raise UserError(f"lmtrain config: expected one of: {', '.join(actions)}")
    return actions[argv[0]](argv[1:])


def _check(argv: list[str]) -> int:
    run = parse_run(Parser("config check", "Validate a config without running anything."), argv)
    print(f"{run.loaded.path}: ok, run id {run.id}")
    return 0


def _show(argv: list[str]) -> int:
    run = parse_run(Parser("config show", "Print a config with includes, overrides and defaults resolved."), argv)
    print(yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
    return 0
