"""`lmtrain report RUN [RUN ...]`: one HTML page and PNG plots of a run, or of several side by side."""

import os

from lmtrain.commands.arguments import Parser
from lmtrain.config.errors import UserError
from lmtrain.report.find import find_runs, tell_apart
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
    found = find_runs(arguments.runs, arguments.log_dir)
    default = os.path.join(found[0].folder, "report.html") if len(found) == 1 else "report.html"
    output = os.path.expanduser(arguments.output or default)
    if os.path.splitext(output)[1] not in (".html", ".htm"):
        raise UserError(f"--output {arguments.output}: expected a name that ends in .html")

    from lmtrain.report.run import read_run  # numpy is imported only now
    from lmtrain.report.write import write_report

    runs = [read_run(files, name) for files, name in zip(found, tell_apart(found), strict=True)]
    plots = write_report(runs, output)
    for each in runs:
        print(f"{each.name}: {each.last_step:,} steps, {len(each.curves):,} metrics shown")
        for notice in each.notices:
            print(f"  {notice}")
    print(f"{output}: {format_bytes(os.path.getsize(output))}; {len(plots)} plots in {os.path.dirname(plots[0])}")
    return 0
