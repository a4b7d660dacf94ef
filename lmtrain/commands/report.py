"""`lmtrain report RUN [RUN ...]`: one HTML page and PNG plots of a run, or of several side by side."""

import os

from lmtrain.commands.arguments import Parser
from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.report.find import find_runs, name_runs
from lmtrain.runtime.progress import format_bytes


def run(argv: list[str]) -> int:
    parser = Parser("report", "Write one self-contained HTML page, and PNG plots, of one run or of several.")
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="run id, <log_dir>/<run_id>, or a metrics.jsonl; the run may still be running",
    )
    parser.add_argument(
        "--log_dir", metavar="DIR", default="logs/", help="folder in which run ids are looked up (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="HTML file to write (default: <log_dir>/<run_id>/report.html; for several runs ./report.html)",
    )
    arguments = parser.parse_args(argv)
    files = find_runs(arguments.runs, arguments.log_dir)
    default = os.path.join(files[0].folder, "report.html") if len(files) == 1 else "report.html"
    output = os.path.expanduser(arguments.output or default)
    if os.path.splitext(output)[1] not in (".html", ".htm"):
        raise UserError(f"--output {arguments.output}: expected a name that ends in .html")

    from lmtrain.report.page import write_report  # numpy is imported only now
    from lmtrain.report.run import read_run

    runs = [read_run(each, name) for each, name in zip(files, name_runs(files), strict=True)]
    plots = write_report(runs, output)
    for each in runs:
        print(f"{each.name}: {counted(each.last_step, 'step')}, {counted(len(each.curves), 'metric')} shown")
        for notice in each.notices:
            print(f"  {notice}")
    size = format_bytes(os.path.getsize(output))
    print(f"{output}: {size}; {counted(len(plots), 'plot')} in {os.path.dirname(plots[0])}")
    return 0
