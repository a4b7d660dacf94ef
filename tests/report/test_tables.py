"""The main figures and the tables of a report."""

import time

from report.made import attempt, read, training, write_complete, write_config, write_ledger, write_log

from lmtrain.report.tables import (
    Cell,
    Table,
    attempts_table,
    differences_table,
    evaluations_table,
    facts_table,
    format_time,
    summarize,
    times_table,
)

NAMES = [Cell(name) for name in ("a", "b", "c")]


def texts(table: Table) -> list[list[str]]:
    """Head and rows; the note of a cell follows a slash."""
    rows = [*([table.head] if table.head else []), *table.rows]
    return [[c if isinstance(c, str) else f"{c.value}/{c.note}" if c.note else c.value for c in row] for row in rows]


def row(table: Table, name: str) -> list[str]:
    return next(cells[1:] for cells in texts(table) if cells[0] == name)


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
    assert texts(attempts_table(read(tmp_path).attempts)) == [
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
    table = facts_table(read(tmp_path))
    assert texts(table)[0] == ["", "from start 1", "from start 3"]
    assert row(table, "versions.jax") == ["1", "2"]
    assert row(table, "mesh.data") == ["8", "8"]
    assert row(table, "throughput/device_kind") == ["abacus", "abacus"]


def test_only_settings_that_differ_are_compared(tmp_path):
    configs = ["a: {x: 1, y: [1, 2], z: null}\n", "a: {x: 2, y: [1, 2], z: null}\n", "a: {x: 1, y: [true, ü]}\n"]
    for name, text in zip("abc", configs, strict=True):
        write_complete(tmp_path, name)
        write_config(tmp_path, name, text)
    runs = [read(tmp_path, name) for name in "abc"]
    assert texts(differences_table(runs, NAMES)) == [
        ["", "a", "b", "c"],
        ["a.x", "1", "2", "1"],
        ["a.y", "[1, 2]", "[1, 2]", '[true, "ü"]'],
        ["a.z", "null", "null", "-"],
    ]
    assert differences_table([runs[0], runs[0]], NAMES[:2]).rows == []
    write_config(tmp_path, "b", "not a map")
    assert texts(differences_table([runs[0], read(tmp_path, "b"), runs[2]], NAMES))[0] == ["", "a", "c"]


def test_times_are_fractions_and_durations(tmp_path):
    write_complete(tmp_path, "a")
    write_log(tmp_path, "b", training())
    runs = [read(tmp_path, "a"), read(tmp_path, "b")]
    alone = times_table(runs[:1], NAMES[:1])
    assert row(alone, "steps/training that counts") == ["52.0 %", "2m10s"]
    assert row(alone, "lost/steps repeated after a restart") == ["4.0 %", "10s"]
    assert not [cells for cells in texts(alone) if cells[0].startswith("restore")]
    both = times_table(runs, NAMES[:2])
    assert row(both, "steps/training that counts") == ["52.0 %/2m10s", "0.0 %/-"]


def test_evaluations_have_last_and_best_of_every_data_set(tmp_path):
    lines = [{"step": 5, "eval/loss": 1.5, "eval/x/bpb": 0.5}, {"step": 9, "eval/loss": 2.5, "eval/x/bpb": None}]
    write_log(tmp_path, "one", lines)
    run = read(tmp_path)
    assert texts(evaluations_table([run], NAMES[:1])) == [
        ["", "last", "best"],
        ["eval/loss", "2.5000", "1.5000 at step 5"],
        ["eval/x/bpb", "NaN or infinite", "0.5000 at step 5"],
    ]
    write_log(tmp_path, "two", [{"step": 1, "train/loss": 1.0}])
    other = read(tmp_path, "two")
    assert evaluations_table([other], NAMES[:1]) is None
    both = evaluations_table([run, other], NAMES[:2])
    assert row(both, "eval/loss") == ["2.5000/best 1.5000 at step 5", "-/best -"]


def figures(run) -> dict[str, tuple[str, str]]:
    return {name: (cell.value, cell.note) for name, cell in summarize(run).items()}


def test_a_complete_run(tmp_path):
    path = write_complete(tmp_path)
    path.write_text(path.read_text() + '{"step": 40, "throughput/mfu": 41.25, "throughput/total_tokens": 5120}\n')
    found = figures(read(tmp_path))
    assert {name: value for name, (value, _) in found.items()}.items() >= {
        *(("steps done", "40"), ("parameters", "1,234,567"), ("tokens seen", "5,120"), ("last train loss", "3.0020")),
        *(("best eval loss", "3.1020"), ("tokens/s", "5,020"), ("MFU", "41.2 %"), ("wall time", "4m10s")),
        *(("goodput", "52.0 %"), ("starts", "2")),
    }


def test_best_is_the_lowest_value(tmp_path):
    losses = [(10, 4.0), (20, 3.0), (30, None), (40, 3.5)]
    lines = [{"step": step, "eval/loss": loss} for step, loss in losses]
    write_log(tmp_path, "one", [*training(5), *lines])
    found = figures(read(tmp_path))
    assert found["best eval loss"] == ("3.0000", "at step 20")
    assert found["last eval loss"] == ("3.5000", "at step 40")
    write_log(tmp_path, "one", [*training(5), *lines[:3]])
    found = figures(read(tmp_path))
    assert found["last eval loss"] == ("NaN or infinite", "at step 30")
    assert found["goodput"] == found["starts"] == ("", "")  # without a ledger
