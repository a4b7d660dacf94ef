"""Samples of generated text in a report."""

import json

from report.made import Page, write_complete
from report.test_page import HOSTILE, build
from report.test_run import read

from lmtrain.report.samples import Sample, read_samples, samples_tables


def write_samples(folder, *samples, end=""):
    path = folder / "one" / "samples.jsonl"
    keys = ("step", "prompt", "text")
    path.write_text("".join(json.dumps(dict(zip(keys, each, strict=True))) + "\n" for each in samples) + end)
    return str(path)


def test_samples_are_shown_per_prompt_newest_first(tmp_path):
    write_complete(tmp_path)
    write_samples(tmp_path, (10, "a", "a one"), (10, "b", "b one"), (20, "a", "a two"), (1000, "a", "a three"))
    page = build(read(tmp_path))
    assert page.problems == []
    assert page.source.index("<h3>a</h3>") < page.source.index("a three") < page.source.index("a two")
    assert page.source.index("a one") < page.source.index("<h3>b</h3>") < page.source.index("b one")
    assert page.row("step 1,000") == ["a three"]


def test_without_the_file_there_is_no_section(tmp_path):
    write_complete(tmp_path)
    run = read(tmp_path)
    assert (run.samples, run.notices) == ([], [])
    assert "Samples" not in build(run).text


def test_text_of_a_sample_is_never_html(tmp_path):
    write_complete(tmp_path)
    write_samples(tmp_path, (10, HOSTILE, f"first\n{HOSTILE}"))
    page = build(read(tmp_path))
    assert page.problems == []
    assert "img" not in page.tags
    assert page.row("step 10") == [f"first\n{HOSTILE}"]


def test_a_repeated_step_shows_the_last_sample(tmp_path):
    (tmp_path / "one").mkdir()
    path = write_samples(tmp_path, (10, "a", "killed"), (10, "a", "resumed"))
    assert read_samples(path, []) == [Sample(10, "a", "resumed")]


def test_invalid_lines_are_reported_and_an_incomplete_last_line_is_ignored(tmp_path):
    (tmp_path / "one").mkdir()
    path = write_samples(tmp_path, (10, "a", "x"), ("10", "a", "x"), (10, None, "x"), end='[1]\n{\n{"step": 11, "pro')
    notices: list[str] = []
    assert read_samples(path, notices) == [Sample(10, "a", "x")]
    assert notices == [f"4 lines of {path} are not samples, and are left out"]


def test_a_file_that_cannot_be_read_is_reported(tmp_path):
    notices: list[str] = []
    assert read_samples(str(tmp_path), notices) == []
    assert notices == [f"{tmp_path} cannot be read: Is a directory"]


def test_earlier_steps_are_folded_and_very_early_ones_left_out():
    page = Page(samples_tables([Sample(step, "a", f"text {step}") for step in range(1, 151)]))
    assert page.problems == []
    assert [cells[0] for cells in page.cells] == [f"step {step}" for step in range(150, 50, -1)]
    assert page.source.index("text 148<") < page.source.index("Earlier steps") < page.source.index("text 147<")
    assert "50 earlier steps are not shown." in page.text
