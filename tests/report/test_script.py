"""The page's script: hover values, logarithmic axes, and other x axes than steps."""

import json
import re

import pytest
from py_mini_racer import mini_racer
from report.browser import Browser, open_page
from report.made import read, training, write_complete, write_log

from lmtrain.report.page import build_page, script
from lmtrain.report.plots import choose_plots

DRAWN = "figureOf('{}').querySelector('.drawn').all().filter((e) => e.tag === '{}').map((e) => {})"


def build(*runs) -> str:
    plots = choose_plots(runs)[0]
    return build_page(runs, plots, {plot.name: b"png" for plot in plots}, [])


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """A run of 40 steps with 8,192 tokens each, that resumed from step 20 and had no loss at step 30."""
    folder = tmp_path_factory.mktemp("page")
    write_complete(folder)
    lines = training()
    for line in lines[1:]:
        if "train/loss" in line:
            line["throughput/total_tokens"] = 8192 * line["step"]
            line["train/loss"] = None if line["step"] == 30 else line["train/loss"]
    write_log(folder, "one", lines)
    return build(read(folder))


def place(browser: Browser, chart: str, step: int, line: int = 0) -> tuple[float, float]:
    """Where a point of a chart is, from the data of the page: linear axes over 40 steps."""
    data = browser.eval(f"JSON.parse(document.getElementById('chart-data').textContent).plots['{chart}']")
    width, height = (806, 260) if data["wide"] else (396, 190)
    steps, values = data["lines"][line]["curve"]["steps"], data["lines"][line]["curve"]["values"]
    value = values[[sum(steps[: at + 1]) for at in range(len(steps))].index(step)]
    low, high = data["y"]
    return 58 + (width - 68) * (step + 0.4) / 40.8, 6 + (height - 36) * (high - value) / (high - low)


def test_the_pointer_shows_run_metric_step_and_value_of_the_nearest_point(page):
    with open_page(page) as browser:
        x, y = place(browser, "loss", 20)
        assert browser.eval(f"pointAt('loss', {x + 2}, {y - 2})") == "one\ntrain/loss\nstep 20\n3.11 nats per token"
        x, y = place(browser, "eval-loss", 20, line=2)
        shown = browser.eval(f"pointAt('eval-loss', {x}, {y})")
        assert shown == "one\neval/books/loss\nstep 20\n3.31 nats per token"
        cross = "figureOf('eval-loss').querySelector('.cross').children.map((e) => e.tag)"
        assert browser.eval(cross) == ["line", "line", "circle"]
        browser.do("figureOf('eval-loss').querySelector('.chart').send('pointerleave')")
        assert browser.eval(cross) == []
        assert browser.eval("figureOf('eval-loss').querySelectorAll('.shown').length") == 0


def test_every_chart_has_hover_values(page):
    with open_page(page) as browser:
        names = browser.eval("document.querySelectorAll('figure[data-chart]').map((e) => e.getAttribute('data-chart'))")
        assert len(names) == 7
        for name in names:
            assert browser.eval(f"pointAt('{name}', 200, 100)").startswith("one\n")


def test_curves_restarts_and_bad_values_are_drawn_at_their_steps(page):
    with open_page(page) as browser:
        texts = browser.eval(DRAWN.format("loss", "text", "e.textContent"))
        assert {"0", "20", "40", "step", "nats per token", "4"} <= set(texts)
        dots = browser.eval(DRAWN.format("loss", "circle", "[e.attributes.cx, e.attributes.cy].map(Number)"))
        assert len(dots) == 39
        assert dots[-1] == pytest.approx(place(browser, "loss", 40))
        vertical = "[e.attributes.x1, e.attributes.stroke, e.attributes.x2]"
        restarts = [each for each in browser.eval(DRAWN.format("loss", "line", vertical)) if each[0] == each[2]]
        assert [float(each[0]) for each in restarts if "restart" in each[1]] == [
            pytest.approx(place(browser, "loss", 20)[0])
        ]
        paths = browser.eval(DRAWN.format("loss", "path", "e.attributes.stroke"))
        assert paths == ["var(--c0)", "var(--bad)"]


def test_a_note_is_hidden_if_the_values_are_logarithmic(page):
    with open_page(page) as browser:
        options = "document.querySelector('.controls').querySelectorAll('option').map((e) => e.textContent)"
        assert browser.eval(options) == ["step", "tokens", "training time"]
        assert browser.eval("figureOf('loss').querySelector('.note').hidden") is False
        browser.do("choose(2, true)")
        assert browser.eval("figureOf('loss').querySelector('.note').hidden") is True
    assert 'class="controls"' not in page  # only a script that runs adds it


def test_another_x_axis_redraws_all_charts_and_step_restores_them(page):
    with open_page(page) as browser:
        before = browser.eval(DRAWN.format("loss", "text", "e.textContent"))
        browser.do("choose(0, 'tokens')")
        for chart in ("loss", "throughput"):
            assert {"0", "100 K", "300 K", "tokens"} <= set(browser.eval(DRAWN.format(chart, "text", "e.textContent")))
        assert len(browser.eval(DRAWN.format("loss", "circle", "1"))) == 39
        assert "\n163.8 K tokens\n" in browser.eval(f"pointAt('loss', {place(browser, 'loss', 20)[0]}, 100)")
        assert browser.eval("location.hash") == "#x=tokens"
        browser.do("choose(0, 'step')")
        assert browser.eval(DRAWN.format("loss", "text", "e.textContent")) == before


def test_training_time_is_the_sum_of_durations_across_restarts(page):
    with open_page(page, "#x=seconds") as browser:
        assert "training time (seconds)" in browser.eval(DRAWN.format("loss", "text", "e.textContent"))
        assert "step 40\n20 seconds of training" in browser.eval("pointAt('loss', 9999, 100)")


def test_logarithmic_axes_have_powers_of_ten_and_leave_out_zero(page):
    with open_page(page, "#x=step&log=xy") as browser:
        texts = browser.eval(DRAWN.format("learning-rate", "text", "e.textContent"))
        assert {"1", "10", "0.001", "5e-5"} <= set(texts)
        path = browser.eval(DRAWN.format("learning-rate", "path", "e.getAttribute('d')"))[0]
        found = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
        # the rate is proportional to the step: on two logarithmic axes the distances are those of log(step)
        steps = [found[at][0] for at in (0, 1, 3, 7)]
        assert steps[1] - steps[0] == pytest.approx(steps[3] - steps[2], abs=0.2)
        rises = [found[at][1] for at in (0, 1, 3, 7)]
        assert rises[0] - rises[1] == pytest.approx(rises[2] - rises[3], abs=0.2)
        assert browser.eval("document.querySelector('.controls').querySelectorAll('input').map((e) => e.checked)") == [
            True,
            True,
        ]


def test_a_run_without_tokens_is_left_out_of_charts_over_tokens(tmp_path):
    lines = [line | {"throughput/total_tokens": 100 * line["step"]} for line in training()]
    write_log(tmp_path, "a", lines)
    write_log(tmp_path, "b", [{"step": step, "train/loss": 5.0} for step in range(1, 41)])
    with open_page(build(read(tmp_path, "a"), read(tmp_path, "b")), "#x=tokens") as browser:
        paths = browser.eval(DRAWN.format("loss", "path", "e.getAttribute('d').length"))
        assert paths[0] > 100
        assert paths[1] == 0
        assert browser.eval("pointAt('loss', 500, 0)").startswith("a\n")


def test_an_axis_that_no_run_has_is_not_offered(tmp_path):
    write_log(tmp_path, "one", [{"step": step, "train/loss": 5.0} for step in range(1, 41)])
    with open_page(build(read(tmp_path)), "#x=tokens") as browser:
        assert browser.eval("document.querySelector('.controls').querySelectorAll('option').length") == 1
        assert "step" in browser.eval(DRAWN.format("loss", "text", "e.textContent"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("linearTicks(0, 100, 5)", [0, 20, 40, 60, 80, 100]),
        ("linearTicks(-0.01, 1.01, 5)", [0, 0.25, 0.5, 0.75, 1]),
        ("linearTicks(0, 3, 6)", [0, 0.5, 1, 1.5, 2, 2.5, 3]),
        ("logTicks(1, 1e9, 5)", [1, 100, 10000, 1000000, 100000000]),
        ("logTicks(0.9, 21, 6)", [1, 2, 5, 10, 20]),
        ("logTicks(3, 4, 5)", [3, 3.2, 3.4, 3.6, 3.8, 4]),
        ("rangeOf([[-1, 0, 2, NaN], [8]], true, 0)", [2, 8]),
        ("rangeOf([[NaN]], true, 0.1)", [1, 10]),
        ("rangeOf([[3, 3]], false, 0.1)", [0, 6]),
        ("[1e6, 1234.5, 0.123456, 1e-5, 0, -1500, NaN].map(formatNumber)",
         ["1,000,000", "1,235", "0.1235", "1e-5", "0", "-1,500", "NaN or infinite"]),
        ("[0, 999, 2048, 15e12].map(formatCount)", ["0", "999", "2.048 K", "15 T"]),
        ("[1, 119, 120, 7200, 2e5].map((each) => durationUnit(each)[1])",
         ["seconds", "seconds", "minutes", "hours", "days"]),
        ("[-5, 0, 5, 15, 99].map((step) => valueAt({steps: [0, 10, 20], values: [0, 100, 300]}, step))",
         [0, 0, 50, 200, 300]),
        ("pathOf([0, 1, NaN, 3, 4], [0, 1, 2, 3, NaN])", "M0.0 0.0L1.0 1.0M3.0 3.0"),
        ("nearestPoint([{xs: [NaN, 0], ys: [0, 0]}, {xs: [5], ys: [5]}], 4, 3).line.xs", [5]),
        ("nearestPoint([{xs: [NaN], ys: [0]}], 4, 3)", None),
        ("decode({steps: [5, 2, 1], values: [1, 2, 3]}).steps", [5, 7, 8]),
    ],
)  # fmt: skip
def test_arithmetic(expression, value):
    with mini_racer() as engine:
        engine.eval(script().replace("\nstart();", ""))
        assert json.loads(engine.eval(f"JSON.stringify({expression})")) == value
