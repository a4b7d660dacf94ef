"""`lmtrain report RUN [RUN ...]`, as a user calls it."""

import os

import pytest
from report.made import Page, write_complete, write_log


def test_a_report_is_written_to_the_folder_of_its_run(tmp_path, run_cli):
    write_complete(tmp_path / "logs")
    done = run_cli("report", "one", code=0)
    assert done.stderr == ""
    assert done.stdout.startswith("one: 40 steps, ")
    assert "7 plots in logs/one/report-plots" in done.stdout
    assert Page((tmp_path / "logs/one/report.html").read_text()).problems == []
    assert len(os.listdir(tmp_path / "logs/one/report-plots")) == 7


def test_runs_of_one_id_are_compared_in_the_current_folder(tmp_path, run_cli):
    write_complete(tmp_path / "logs", rate=1e-3)
    write_complete(tmp_path / "other", rate=2e-3, offset=0.5)
    run_cli("report", "one", "other/one.metrics.jsonl", code=0)
    page = Page((tmp_path / "report.html").read_text())
    assert page.problems == []
    assert page.row("") == ["one (logs)", "one (other)"]
    assert page.row("optimizer.learning_rate") == ["0.001", "0.002"]
    assert [restart["run"] for restart in page.data["plots"]["loss"]["restarts"]] == [0, 1]
    assert (tmp_path / "report-plots" / "eval-loss-eval-books-loss.png").stat().st_size > 5000


def test_a_running_run_is_reported_with_notices_of_missing_files(tmp_path, run_cli):
    write_log(
        tmp_path / "there", "going", [{"step": n, "train/loss": 1.0} for n in range(21)], torn='{"step": 21, "tra'
    )
    out = run_cli("report", "going", "--log_dir", "there", "--output", "out/now.html", code=0).stdout
    assert out.startswith("going: 20 steps, ")
    assert [f"there/going/{name} not found" in out for name in ("goodput.json", "config.yaml")] == [True, True]
    assert sorted(os.listdir(tmp_path / "out")) == ["now-plots", "now.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["onne"], "'one'?"), (["empty"], "logs/empty.metrics.jsonl"), (["one", "--output", "x.pdf"], "--output x.pdf: ")],
)
def test_user_errors_are_printed_and_write_nothing(tmp_path, run_cli, arguments, message):
    write_log(tmp_path / "logs", "empty", [])
    os.utime(tmp_path / "logs/empty.metrics.jsonl", (1, 1))
    write_complete(tmp_path / "logs")
    done = run_cli("report", *arguments, code=2)
    assert done.stdout == ""
    assert message in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".png")]
