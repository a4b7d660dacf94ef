"""A report on disk."""

import matplotlib.image
import pytest
from report.made import Page, pixels, write_complete
from report.test_run import read

from lmtrain.config.errors import UserError
from lmtrain.report.theme import light
from lmtrain.report.write import write_report


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_complete(folder)
    return folder, write_report([read(folder)], str(folder / "new" / "r.html"))


def test_the_plots_are_next_to_the_page_and_show_curves(written):
    folder, plots = written
    names = ["loss", "eval-loss", "eval-bpb", "learning-rate", "gradient-norm", "throughput", "step-time", "goodput"]
    assert plots == [f"{folder}/new/r-plots/{name}.png" for name in names]
    for path in plots:
        height, width = matplotlib.image.imread(path).shape[:2]
        assert width == (1792 if path.endswith(("loss.png", "goodput.png")) and "eval" not in path else 880)
        assert 150 < height < 800
        assert pixels(path, light("c0")) > 500
        assert (pixels(path, light("restart")) > 20) == (not path.endswith("goodput.png"))


def test_the_page_has_every_plot_in_it_and_needs_nothing_else(written):
    page = Page((written[0] / "new" / "r.html").read_text())
    assert page.problems == []
    assert page.tags.count("svg") == 8
    assert {"loss-restart-0", "eval-loss-restart-0", "goodput-time-0-lost"} <= set(page.ids)
    assert "<title>one: lost 4.0 %</title>" in page.source
    assert len(page.data["plots"]) == 7
    assert sorted(path.name for path in (written[0] / "new").iterdir()) == ["r-plots", "r.html"]


def test_a_failed_write_is_an_error_and_keeps_the_old_page(tmp_path):
    write_complete(tmp_path)
    (tmp_path / "r.html").write_text("old")
    (tmp_path / "r-plots" / "loss.png").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--output .*r\.html cannot be written: Is a directory"):
        write_report([read(tmp_path)], str(tmp_path / "r.html"))
    assert (tmp_path / "r.html").read_text() == "old"
