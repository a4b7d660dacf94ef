"""The page is well formed and complete, and loads nothing, whatever names and values a run has."""

import base64
import hashlib
import html
import re

import pytest
from report.made import (
    Page,
    attempt,
    read,
    training,
    write_complete,
    write_config,
    write_ledger,
    write_log,
    write_samples,
)

from lmtrain.report.page import build_page, script, script_source, write_report
from lmtrain.report.plots import choose_plots
from lmtrain.runtime.errors import UserError

HOSTILE = "</script><script>alert(1)</script><!--\"'><img src=x onerror=alert(1)>&amp;${x}{{ x }}"


def build(*runs, notes=()) -> Page:
    plots = choose_plots(runs)[0]
    page = Page(build_page(runs, plots, {plot.name: b"png" for plot in plots}, notes))
    assert page.problems == []
    return page


def headings(page: Page) -> list[str]:
    return re.findall("<h2>([^<]*)", page.source)


def test_one_run(tmp_path):
    write_complete(tmp_path)
    page = build(read(tmp_path), notes=["a note"])
    assert page.source.startswith("<!DOCTYPE html>\n<html lang=")
    for text in ("3.0020", "a note", "# my.yaml:3"):
        assert text in page.text
    assert headings(page) == ["Curves", "Goodput", "Evaluation", "Starts", "Versions and devices", "Config"]
    assert page.row("versions.jax") == ["0.10.2"]


def test_several_runs(tmp_path):
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        write_complete(tmp_path, name, rate=rate)
    page = build(read(tmp_path, "a"), read(tmp_path, "b"))
    assert page.row("optimizer.learning_rate") == ["0.001", "0.002"]
    assert page.row("steps done") == ["40 of 40", "40 of 40"]
    assert "trainer.num_train_steps" not in [cells[0] for cells in page.cells]
    assert "Settings that differ" in headings(page)
    (tmp_path / "b" / "config.yaml").unlink()
    assert "Settings that differ" not in headings(build(read(tmp_path, "a"), read(tmp_path, "b")))


@pytest.mark.parametrize("several", [False, True])
def test_text_of_a_run_is_never_html(tmp_path, several):
    name = HOSTILE.replace("/", "")
    write_log(tmp_path, name, [{"step": 0, HOSTILE: HOSTILE}, *training(sets=(HOSTILE,))[1:]])
    write_ledger(tmp_path, name, [attempt(1, 2, 0, 40, facts={HOSTILE: {HOSTILE: [HOSTILE]}}, **{HOSTILE: 4.0})])
    write_config(tmp_path, name, f"a: {HOSTILE!r}\nb: </pre>{HOSTILE}")
    write_complete(tmp_path, "other")
    page = build(read(tmp_path, name), *([read(tmp_path, "other")] if several else []))
    assert page.tags.count("img") == len(page.data["plots"])
    assert page.tags.count("script") == 2  # the data and the package's own
    assert page.data["runs"][0]["name"] == name
    assert name in page.text
    assert {f"eval/{HOSTILE}/loss", f"{HOSTILE}.{HOSTILE}"} <= {cells[0] for cells in page.cells}
    assert f"</pre>{HOSTILE}" in page.text


def test_samples_are_shown_per_prompt_newest_first_and_earlier_ones_are_folded(tmp_path):
    write_complete(tmp_path)
    write_samples(
        tmp_path, (10, "a", f"first\n{HOSTILE}"), (1000, "b", "b"), *((step, "a", "x") for step in (20, 30, 40))
    )
    page = build(read(tmp_path))
    assert [cells[0] for cells in page.cells if cells[0].startswith("step ")] == [
        *("step 40", "step 30", "step 20", "step 10"),
        "step 1,000",
    ]
    assert page.row("step 10") == [f"first\n{HOSTILE}"]
    assert page.source.index("<h3>a</h3>") < page.source.index("Earlier steps") < page.source.index("<h3>b</h3>")
    assert page.source.count("Earlier steps") == 1


def test_missing_files_are_reported_and_left_out(tmp_path):
    write_log(tmp_path, "one", training())
    page = build(read(tmp_path))
    assert "goodput.json not found: restarts and wall times are unknown" in page.text
    assert headings(page) == ["Curves", "Evaluation", "Versions and devices"]


def test_the_policy_allows_the_script_of_the_package_alone(tmp_path):
    write_complete(tmp_path)
    source = build(read(tmp_path)).source
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', source)[1])
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert script_source() == f"'sha256-{digest}'"
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith(f"; script-src {script_source()}")


def test_a_failed_write_is_an_error_and_keeps_the_old_page(tmp_path):
    write_complete(tmp_path)
    (tmp_path / "r.html").write_text("old")
    (tmp_path / "r-plots" / "loss.png").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--output .*r\.html"):
        write_report([read(tmp_path)], str(tmp_path / "r.html"))
    assert (tmp_path / "r.html").read_text() == "old"
