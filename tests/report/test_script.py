"""The page's script: hover values, logarithmic axes, and other x axes than steps."""

import base64
import hashlib
import json
import re

import pytest
from py_mini_racer import mini_racer
from report.browser import Browser, open_page
from report.made import Page, training, write_complete, write_log
from report.test_run import read

from lmtrain.report.script import script, script_elements, script_source
from lmtrain.report.write import write_report

HIDDEN = "figureOf('{}').all().filter((e) => e.getAttribute('display') === 'none').map((e) => e.id)"
REDRAWN = "figureOf('{}').querySelector('.redrawn').all().filter((e) => e.tag === '{}').map((e) => {})"


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
    write_report([read(folder)], str(folder / "r.html"))
    return (folder / "r.html").read_text()


def place(browser: Browser, chart: str, step: int, line: int = 0) -> tuple[float, float]:
    """Where a point of the picture as delivered is, from the data of the page: linear axes over steps."""
    data = browser.eval(f"JSON.parse(document.getElementById('chart-data').textContent).plots['{chart}']")
    left, top, width, height = data["box"]
    steps, values = data["lines"][line]["curve"]["steps"], data["lines"][line]["curve"]["values"]
    value = values[[sum(steps[: at + 1]) for at in range(len(steps))].index(step)]
    (x0, x1), (y0, y1) = data["x"], data["y"]
    return left + width * (step - x0) / (x1 - x0), top + height * (y1 - value) / (y1 - y0)


def test_the_pointer_shows_run_metric_step_and_value_of_the_nearest_point(page):
    with open_page(page) as browser:
        x, y = place(browser, "loss", 20)
        assert browser.eval(f"pointAt('loss', {x + 2}, {y - 2})") == "one\ntrain/loss\nstep 20\n3.11 nats per token"
        x, y = place(browser, "eval-loss", 20, line=2)
        shown = browser.eval(f"pointAt('eval-loss', {x}, {y})")
        assert shown == "one\neval/books/loss\nstep 20\n3.31 nats per token"
        cross = "figureOf('eval-loss').querySelector('.cross').children.map((e) => e.tag)"
        assert browser.eval(cross) == ["line", "line", "circle"]
        browser.do("figureOf('eval-loss').querySelector('svg').send('pointerleave')")
        assert browser.eval(cross) == []
        assert browser.eval("figureOf('eval-loss').querySelectorAll('.shown').length") == 0


def test_every_chart_has_hover_values(page):
    with open_page(page) as browser:
        names = browser.eval("document.querySelectorAll('figure[data-chart]').map((e) => e.getAttribute('data-chart'))")
        assert len(names) == 7
        for name in names:
            assert browser.eval(f"pointAt('{name}', 200, 100)").startswith("one\n")


def test_points_are_where_the_picture_has_them(page):
    """The path that matplotlib drew has the coordinates that the script computes from the data."""
    drawn = re.search(r'<g id="learning-rate-line-0">\s*<path d="([^"]*)"', page)[1]
    with open_page(page) as browser:
        x, y = place(browser, "learning-rate", 40)
    last = [float(number) for number in re.findall(r"[\d.]+", drawn)[-2:]]
    assert last == pytest.approx([x, y], abs=0.02)


def test_the_page_opens_with_the_picture_as_delivered(page):
    with open_page(page) as browser:
        assert browser.eval(HIDDEN.format("loss")) == []
        assert browser.eval(REDRAWN.format("loss", "path", "1")) == []
        options = "document.querySelector('.controls').querySelectorAll('option').map((e) => e.textContent)"
        assert browser.eval(options) == ["step", "tokens", "training time"]
    assert 'class="controls"' not in page  # only a script that runs adds it


def test_another_x_axis_redraws_all_charts_and_step_restores_them(page):
    with open_page(page) as browser:
        browser.do("choose(0, 'tokens')")
        hidden = browser.eval(HIDDEN.format("loss"))
        assert sorted(hidden) == ["loss-axis-x", "loss-axis-y", "loss-bad", "loss-line-0", "loss-restart-0"]
        texts = browser.eval(REDRAWN.format("loss", "text", "e.textContent"))
        assert {"0", "100 K", "300 K", "tokens", "nats per token"} <= set(texts)
        assert len(browser.eval(REDRAWN.format("loss", "circle", "1"))) == 39
        assert browser.eval(HIDDEN.format("throughput"))
        assert "\n163.8 K tokens\n" in browser.eval(f"pointAt('loss', {place(browser, 'loss', 20)[0]}, 100)")
        assert browser.eval("location.hash") == "#x=tokens"
        browser.do("choose(0, 'step')")
        assert browser.eval(HIDDEN.format("loss")) == browser.eval(REDRAWN.format("loss", "text", "1")) == []


def test_training_time_is_the_sum_of_durations_across_restarts(page):
    with open_page(page, "#x=seconds") as browser:
        assert "training time (seconds)" in browser.eval(REDRAWN.format("loss", "text", "e.textContent"))
        assert "step 40\n20 seconds of training" in browser.eval("pointAt('loss', 9999, 100)")


def test_logarithmic_axes_have_powers_of_ten_and_leave_out_zero(page):
    with open_page(page, "#x=step&log=xy") as browser:
        texts = browser.eval(REDRAWN.format("learning-rate", "text", "e.textContent"))
        assert {"1", "10", "0.001", "5e-5"} <= set(texts)
        path = browser.eval(REDRAWN.format("learning-rate", "path", "e.getAttribute('d')"))[0]
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
    write_report([read(tmp_path, "a"), read(tmp_path, "b")], str(tmp_path / "r.html"))
    with open_page((tmp_path / "r.html").read_text(), "#x=tokens") as browser:
        paths = browser.eval(REDRAWN.format("loss", "path", "e.getAttribute('d').length"))
        assert paths[0] > 100
        assert paths[1] == 0
        assert browser.eval("pointAt('loss', 500, 0)").startswith("a\n")


def test_an_axis_that_no_run_has_is_not_offered(tmp_path):
    write_log(tmp_path, "one", [{"step": step, "train/loss": 5.0} for step in range(1, 41)])
    write_report([read(tmp_path)], str(tmp_path / "r.html"))
    with open_page((tmp_path / "r.html").read_text(), "#x=tokens") as browser:
        assert browser.eval("document.querySelector('.controls').querySelectorAll('option').length") == 1
        assert browser.eval(HIDDEN.format("loss")) == []


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


def test_the_policy_allows_this_script_alone(page):
    parsed = Page(page)
    assert parsed.problems == []
    assert parsed.tags.count("script") == 2
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert script_source() == f"'sha256-{digest}'"
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith(f"; script-src {script_source()}")


def test_data_cannot_end_its_element():
    text = "</script><script>alert(1)</script><!--"
    elements = script_elements({"runs": [{"name": text}]})
    assert elements.count("<script") == elements.count("</script") == 2
    assert "<!--" not in elements
