"""The page is well formed and complete, and loads nothing, whatever names and values a run has."""

import pytest
from report.made import Page, attempt, training, write_complete, write_config, write_ledger, write_log
from report.test_run import read

from lmtrain.report.html import Markup
from lmtrain.report.page import Picture, build_page

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;${x}"
SVG = [Picture(Markup('<svg id="a"></svg>'), True, {"name": "loss", "lines": []})]


def build(*runs) -> Page:
    return Page(build_page(runs, SVG, Markup('<svg id="b"></svg>'), ["a note"]))


def test_one_run(tmp_path):
    write_complete(tmp_path)
    page = build(read(tmp_path))
    assert page.problems == []
    assert page.source.startswith("<!DOCTYPE html>\n<html lang=")
    assert "default-src 'none'" in page.source.replace("&#x27;", "'")
    for text in ("Training run", "one", "3.0020", "a note", "Dotted vertical lines are restarts", "# my.yaml:3"):
        assert text in page.text
    headings = ["Curves", "Goodput", "Evaluation", "Starts", "Versions and devices", "Config"]
    assert [part.split("<")[0] for part in page.source.split("<h2>")[1:]] == headings
    assert page.row("versions.jax") == ["0.10.2"]


def test_several_runs(tmp_path):
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        write_complete(tmp_path, name, rate=rate)
    page = build(read(tmp_path, "a"), read(tmp_path, "b"))
    assert page.problems == []
    assert page.row("optimizer.learning_rate") == ["0.001", "0.002"]
    assert page.row("steps done") == ["40of 40", "40of 40"]
    assert "trainer.num_train_steps" not in [cells[0] for cells in page.cells]
    assert page.tags.count("details") == 4  # each run, and within it its config


def test_equal_settings_are_reported_as_such(tmp_path):
    for name in ("a", "b"):
        write_complete(tmp_path, name)
    assert "All settings are the same." in build(read(tmp_path, "a"), read(tmp_path, "b")).text


@pytest.mark.parametrize("several", [False, True])
def test_text_of_a_run_is_never_html(tmp_path, several):
    name = HOSTILE.replace("/", "")
    write_log(tmp_path, name, [{"step": 0, HOSTILE: HOSTILE}, *training(sets=(HOSTILE,))[1:]])
    write_ledger(tmp_path, name, [attempt(1, 2, 0, 40, facts={HOSTILE: {HOSTILE: [HOSTILE]}}, **{HOSTILE: 4.0})])
    write_config(tmp_path, name, f"a: {HOSTILE!r}\nb: </pre>{HOSTILE}")
    write_complete(tmp_path, "other")
    runs = [read(tmp_path, name), *([read(tmp_path, "other")] if several else [])]
    page = build(*runs)
    assert page.problems == []
    assert "img" not in page.tags
    assert page.tags.count("script") == 2  # the data and the package's own
    assert page.data["runs"][0]["name"] == name
    assert name in page.text
    assert f"eval/{HOSTILE}/loss" in [cells[0] for cells in page.cells]
    assert f"{HOSTILE}.{HOSTILE}" in [cells[0] for cells in page.cells]
    assert f"</pre>{HOSTILE}" in page.text


def test_missing_files_are_reported_and_left_out(tmp_path):
    write_log(tmp_path, "one", training())
    page = Page(build_page([read(tmp_path)], SVG, Markup(""), []))
    assert page.problems == []
    assert "goodput.json not found: restarts and wall times are unknown" in page.text
    assert "Starts" not in page.text
    assert "restarts." not in page.text
