"""`lmtrain report RUN [RUN ...]`, as a user calls it."""

import os

import pytest
from report.made import Page, write_complete, write_log

from lmtrain import cli


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lmtrain(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_a_report_is_written_to_the_folder_of_its_run(folder, capsys):
    write_complete(folder / "logs")
    code, out, err = lmtrain(capsys, "report", "one")
    assert (code, err) == (0, "")
    assert out.startswith("one: 40 steps, ")
    assert "logs/one/report.html: " in out
    assert "7 plots in logs/one/report-plots" in out
    assert Page((folder / "logs/one/report.html").read_text()).problems == []
    assert len(os.listdir(folder / "logs/one/report-plots")) == 7


def test_runs_of_one_id_are_compared_in_the_current_folder(folder, capsys):
    write_complete(folder / "logs", rate=1e-3)
    write_complete(folder / "other", rate=2e-3, offset=0.5)
    code, out, _ = lmtrain(capsys, "report", "one", "other/one.metrics.jsonl")
    assert code == 0
    assert "report.html: " in out
    page = Page((folder / "report.html").read_text())
    assert page.problems == []
    assert page.row("") == ["one (logs)", "one (other)"]
    assert page.row("optimizer.learning_rate") == ["0.001", "0.002"]
    assert [restart["run"] for restart in page.data["plots"]["loss"]["restarts"]] == [0, 1]
    assert (folder / "report-plots" / "eval-loss-eval-books-loss.png").stat().st_size > 5000


def test_a_running_run_is_reported_with_notices_of_missing_files(folder, capsys):
    write_log(folder / "there", "going", [{"step": n, "train/loss": 1.0} for n in range(21)], torn='{"step": 21, "tra')
    code, out, _ = lmtrain(capsys, "report", "going", "--log_dir", "there", "--output", "out/now.html")
    assert code == 0
    assert out.startswith("going: 20 steps, ")
    assert [f"there/going/{name} not found" in out for name in ("goodput.json", "config.yaml")] == [True, True]
    assert sorted(os.listdir(folder / "out")) == ["now-plots", "now.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["onne"], "'one'?"), (["empty"], "logs/empty.metrics.jsonl"), (["one", "--output", "x.pdf"], "--output x.pdf: ")],
)
def test_user_errors_are_printed_and_write_nothing(folder, capsys, arguments, message):
    write_log(folder / "logs", "empty", [])
    os.utime(folder / "logs/empty.metrics.jsonl", (1, 1))
    write_complete(folder / "logs")
    code, out, err = lmtrain(capsys, "report", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not [path for path in folder.rglob("*") if path.suffix in (".html", ".png")]
