"""`lmtrain report RUN [RUN ...]`: one HTML page and PNG plots of a run, of several side by side, or of a ladder."""

import os
from collections.abc import Sequence

import yaml

from lmtrain.commands.arguments import Parser
from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.redact import redact


def run(argv: list[str]) -> int:
    parser = Parser("report", "Write one self-contained HTML page, and PNG plots, of one run or of several.")
    add = parser.add_argument
    add(
        "runs",
        metavar="RUN",
        nargs="*",
        help="run id, <log_dir>/<run_id>, or a metrics.jsonl; the run may still be running",
    )
    add(
        "--log_dir", metavar="DIR", default="logs/", help="folder in which run ids are looked up (default: %(default)s)"
    )
    add(
        "--output",
        metavar="FILE",
        help="HTML file to write (default: <log_dir>/<run_id>/report.html; for several runs ./report.html; for a "
        "ladder ./<ladder>-report.html)",
    )
    add("--scaling", metavar="LADDER", help="a ladder, its law and its plots, instead of runs")
    add("--predict", metavar="CONFIG", action="append", default=[], help="config to predict by the law of --scaling")
    arguments = parser.parse_args(argv)
    if arguments.scaling is not None:
        if arguments.runs:
            raise UserError(f"--scaling reports on the runs of a ladder; remove {arguments.runs[0]}")
        return _report_ladder(arguments.scaling, arguments.predict, arguments.output)
    if not arguments.runs:
        parser.error("the following arguments are required: RUN, or --scaling LADDER")
    if arguments.predict:
        raise UserError("--predict needs --scaling LADDER")
    from lmtrain.report.run import find_runs, name_runs  # numpy is imported only now

    files = find_runs(arguments.runs, arguments.log_dir)
    default = os.path.join(files[0].folder, "report.html") if len(files) == 1 else "report.html"
    output = _html(arguments.output or default)

    from lmtrain.report.page import write_report  # numpy is imported only now
    from lmtrain.report.run import read_run

    runs = [read_run(each, name) for each, name in zip(files, name_runs(files), strict=True)]
    plots = write_report(runs, output)
    for each in runs:
        print(f"{each.name}: {counted(each.last_step, 'step')}, {counted(len(each.curves), 'metric')} shown")
        for notice in each.notices:
            print(f"  {notice}")
    _say_written(output, plots)
    return 0


def _report_ladder(path: str, configs: list[str], output: str | None) -> int:
    """The page of a ladder, with the predicted losses of these configs."""
    from lmtrain.commands.scaling import read_fit, read_ladder, train_tokens
    from lmtrain.report.scaling_page import write_scaling_report
    from lmtrain.scaling.describe import effect_lines
    from lmtrain.scaling.predict import check_config, predict, tokens_of, unknown_effects
    from lmtrain.scaling.results import read_results

    ladder = read_ladder(path, None)
    page = _html(output or f"{ladder.name}-report.html")
    big = {name: load_config(RunConfig, name).config for name in configs}
    try:
        fitted, reason = read_fit(ladder), ""
    except UserError as error:
        if configs:
            raise
        fitted, reason = None, str(error)
    predictions, effects = {}, {}
    if fitted is not None:
        for name, config in big.items():
            check_config(ladder, name, config)
            predictions[name] = predict(fitted, config.model, tokens_of(config))
            effects[name] = list(effect_lines(unknown_effects(fitted, config, train_tokens(config))))
    settings = yaml.safe_dump(redact(ladder.config.model_dump(mode="json")), sort_keys=False)
    plots = write_scaling_report(ladder, read_results(ladder), fitted, reason, predictions, effects, settings, page)
    print(reason or f"{ladder.name}: {counted(len(plots), 'plot')}")
    _say_written(page, plots)
    return 0


def _html(output: str) -> str:
    path = os.path.expanduser(output)
    if os.path.splitext(path)[1] not in (".html", ".htm"):
        raise UserError(f"--output {output}: expected a name that ends in .html")
    return path


def _say_written(output: str, plots: Sequence[str]) -> None:
    size = format_bytes(os.path.getsize(output))
    where = f" in {os.path.dirname(plots[0])}" if plots else ""
    print(f"{output}: {size}; {counted(len(plots), 'plot')}{where}")
