"""`lmtrain config check|show|schema`: validate a config, print it resolved, or print what all settings are."""

import json

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import UserError
from lmtrain.config.schema import build_schema
from lmtrain.config.show import show
from lmtrain.run.config import RunConfig, resolved


def run(argv: list[str]) -> int:
    actions = {"check": _check, "show": _show, "schema": _schema}
    if argv and argv[0] in ("-h", "--help"):
        print(
            "usage: lmtrain config check CONFIG [--section.field VALUE ...]\n"
            "       lmtrain config show CONFIG [--plot-lr FILE] [--section.field VALUE ...]\n"
            "       lmtrain config schema"
        )
        return 0
    if not argv or argv[0] not in actions:
        raise UserError(f"lmtrain config: expected one of: {', '.join(actions)}")
    return actions[argv[0]](argv[1:])


def _check(argv: list[str]) -> int:
    run = parse_run(Parser("config check", "Validate a config without running anything."), argv)
    print(f"{run.loaded.path}: ok, run id {run.id}")
    return 0


def _show(argv: list[str]) -> int:
    parser = Parser("config show", "Print a config resolved, each value with where it came from.")
    parser.add_argument("--plot-lr", metavar="FILE", help="draw the learning rate over the run instead (png, svg, pdf)")
    run = parse_run(parser, argv)
    if run.arguments.plot_lr is not None:
        from lmtrain.commands.plot_lr import plot_learning_rate

        plot_learning_rate(run.config, run.arguments.plot_lr)
        print(f"wrote {run.arguments.plot_lr}")
        return 0
    print(show(resolved(run.config), run.loaded.layer), end="")
    return 0


def _schema(argv: list[str]) -> int:
    Parser("config schema", "Print a JSON Schema of the config, for editors.").parse_args(argv)
    print(json.dumps(build_schema(RunConfig, "An lmtrain config"), indent=2, ensure_ascii=False))
    return 0
