"""The tables of a report."""

import time

from report.made import Page, attempt, training, write_complete, write_config, write_ledger, write_log
from report.test_run import read

from lmtrain.report.html import element
from lmtrain.report.tables import (
    attempts_table,
    differences_table,
    evaluations_table,
    facts_table,
    format_time,
    summaries_table,
    times_table,
)

NAMES = [element("span", name) for name in ("a", "b", "c")]


def test_starts_have_times_steps_and_lost_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    write_complete(tmp_path)
    starts = [
        attempt(1e9, 1e9 + 3700, 0, 900, steps=3000.0, compile=42.0),
        attempt(1e9 + 4000, 1e9 + 4010, 900, 950, start_up=10.0),
        attempt(1e9 + 5000, 1e9 + 6000, 800, 1000, steps=900.0),
    ]
    write_ledger(tmp_path, "one", starts)
    cells = Page(attempts_table(read(tmp_path).attempts)).cells
    assert cells == [
        ["start", "started", "last update", "from step", "to step", "steps lost", "steps", "compile", "start up"],
        ["1", "2001-09-09 01:46", "2001-09-09 02:48", "0", "900", "100", "50m00s", "42s", "0s"],
        ["2", "2001-09-09 02:53", "2001-09-09 02:53", "900", "950", "50", "0s", "0s", "10s"],
        ["3", "2001-09-09 03:10", "2001-09-09 03:26", "800", "1,000", "0", "15m00s", "0s", "0s"],
    ]
    assert format_time(1e300) == "1e+300"


def test_facts_have_a_column_per_change(tmp_path):
    write_complete(tmp_path)
    facts = [{"versions": {"jax": "1"}, "mesh": {"data": 8}}] * 2 + [{"versions": {"jax": "2"}, "mesh": {"data": 8}}]
    write_ledger(tmp_path, "one", [attempt(n, n, n, n + 1, facts=each) for n, each in enumerate(facts)])
    page = Page(facts_table(read(tmp_path)))
    assert page.cells[0] == ["", "from start 1", "from start 3"]
    assert page.row("versions.jax") == ["1", "2"]
    assert page.row("mesh.data") == ["8", "8"]
    assert page.row("throughput/device_kind") == ["abacus", "abacus"]


def test_without_a_ledger_facts_come_from_the_log(tmp_path):
    write_log(tmp_path, "one", training())
    assert Page(facts_table(read(tmp_path))).row("parameter_count") == ["1,234,567"]
    write_log(tmp_path, "one", training()[1:])
    assert facts_table(read(tmp_path)) is None


def test_only_settings_that_differ_are_compared(tmp_path):
    configs = ["a: {x: 1, y: [1, 2], z: null}\n", "a: {x: 2, y: [1, 2], z: null}\n", "a: {x: 1, y: [true, ü]}\n"]
    for name, text in zip("abc", configs, strict=True):
        write_complete(tmp_path, name)
        write_config(tmp_path, name, text)
    runs = [read(tmp_path, name) for name in "abc"]
    assert Page(differences_table(runs, NAMES)).cells == [
        ["", "a", "b", "c"],
        ["a.x", "1", "2", "1"],
        ["a.y", "[1, 2]", "[1, 2]", '[true, "ü"]'],
        ["a.z", "null", "null", "-"],
    ]
    assert differences_table([runs[0], runs[0]], NAMES[:2]) is None
    write_config(tmp_path, "b", "not a map")
    assert Page(differences_table([runs[0], read(tmp_path, "b"), runs[2]], NAMES)).cells[0] == ["", "a", "c"]


def test_times_are_fractions_and_durations(tmp_path):
    write_complete(tmp_path, "a")
    write_log(tmp_path, "b", [*training(), {"step": 40, "goodput/steps": 1.0}])
    runs = [read(tmp_path, "a"), read(tmp_path, "b")]
    alone = Page(times_table(runs[:1], NAMES[:1]))
    assert alone.row("steps training that counts") == ["52.0 %", "2m10s"]
    assert alone.row("lost steps repeated after a restart") == ["4.0 %", "10s"]
    assert not [cells for cells in alone.cells if cells[0].startswith("restore")]
    both = Page(times_table(runs, NAMES[:2]))
    assert both.row("steps training that counts") == ["52.0 %2m10s", "100.0 %-"]


def test_evaluations_have_last_and_best_of_every_data_set(tmp_path):
    lines = [{"step": 5, "eval/loss": 1.5, "eval/x/bpb": 0.5}, {"step": 9, "eval/loss": 2.5, "eval/x/bpb": None}]
    write_log(tmp_path, "one", lines)
    run = read(tmp_path)
    assert Page(evaluations_table([run], NAMES[:1])).cells == [
        ["", "last", "best"],
        ["eval/loss", "2.5000", "1.5000 at step 5"],
        ["eval/x/bpb", "NaN or infinite", "0.5000 at step 5"],
    ]
    write_log(tmp_path, "two", [{"step": 1, "train/loss": 1.0}])
    other = read(tmp_path, "two")
    assert evaluations_table([other], NAMES[:1]) is None
    assert Page(evaluations_table([run, other], NAMES[:2])).row("eval/loss") == [
        "2.5000best 1.5000 at step 5",
        "-best -",
    ]


def test_other_evaluations_have_no_best(tmp_path):
    write_log(tmp_path, "one", [{"step": 5, "eval/accuracy/top1": 0.25}, {"step": 9, "eval/accuracy/top1": 0.5}])
    table = Page(evaluations_table([read(tmp_path)], NAMES[:1]))
    assert table.cells == [["", "last", "best"], ["eval/accuracy/top1", "0.5000", "-"]]


def test_summaries_are_side_by_side(tmp_path):
    write_complete(tmp_path, "a")
    write_log(tmp_path, "b", training(20))
    page = Page(summaries_table([read(tmp_path, "a"), read(tmp_path, "b")], NAMES[:2]))
    assert page.cells[0] == ["", "a", "b"]
    assert page.row("steps done") == ["40of 40", "20"]
    assert page.row("starts") == ["2", "-"]
    assert not [cells for cells in page.cells if cells[0] == "MFU"]
