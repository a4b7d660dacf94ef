"""The search for settings, with a compiler that computes nothing."""

import pytest
from plan.workers import FakeCompiler, request

from lmtrain.plan.report import search_json, search_lines
from lmtrain.plan.search import Search, Trial
from lmtrain.runtime.signals import StoppedError


def cost(size, checkpointing):
    """With more sequences per microbatch or less recomputation, time falls and memory grows."""
    keeps = {False: 8, "dots": 4}.get(checkpointing, 1)
    return 4.0 / size - 0.01 * keeps, 10.0 + size * keeps, 10.0


@pytest.fixture
def search(monkeypatch):
    """A function of the capacity, the compiler and the lines that are reported."""

    def build(capacity: float, compiler=None, report=lambda line: None) -> Search:
        monkeypatch.setattr("lmtrain.plan.search.ask", compiler or FakeCompiler(cost))
        return Search(request=request(), capacity=capacity, timeout=60.0, report=report)

    return build


@pytest.mark.parametrize(("capacity", "size"), [(15.0, 4), (11.5, 1), (10.5, None), (9.0, None)])
def test_the_largest_size_that_fits_is_found_by_bisection(search, capacity, size):
    compiler = FakeCompiler(cost)
    largest = search(capacity, compiler).largest_that_fits()
    assert (largest and largest.changes["trainer.per_device_parallelism"]) == size
    assert compiler.compiled <= (0 if capacity < 10 else 12)  # the state alone does not fit: nothing is compiled


def test_the_search_ends_with_the_fastest_that_fits_and_counts_the_rest(search):
    compiler = FakeCompiler(cost)
    lines: list[str] = []
    result = search(20.0, compiler, lines.append)
    result.run(1.0)
    assert result.best is not None
    assert result.best.peak <= 20
    assert result.best.changes["trainer.per_device_parallelism"] == 6
    assert result.untried == 0
    assert len(lines) == len(result.trials) == compiler.compiled
    text = "\n".join(search_lines(result))
    assert f"# best of {len(lines)} tried: {result.best.seconds:.4g} s per step" in text
    assert "per_device_parallelism: 6" in text
    assert len(search_json(result)["trials"]) == len(lines)


def test_of_equally_fast_settings_the_one_with_less_memory_is_kept(search):
    """Offloading costs no time here and halves the memory, so that more sequences fit, which saves time."""
    result = search(
        12.0, FakeCompiler(lambda size, policy: (12.0 / size, size if policy == "offload" else 2 * size, 0))
    )
    result.run(1.0)
    assert result.best is not None
    assert result.best.changes["model.gradient_checkpointing"] == "offload"
    assert result.best.changes["trainer.per_device_parallelism"] == 12


def test_products_in_8_bits_are_kept_only_if_they_pay_by_cycles_if_there_are():
    def trial(seconds, products=None, cycles=None):
        return Trial(name="", changes={}, seconds=seconds, peak=1.0, fits=True, products=products, cycles=cycles)

    assert trial(0.9, "fp8").is_better_than(trial(1.0))
    assert not trial(0.95, "fp8").is_better_than(trial(1.0))
    assert not trial(0.5, "int8", 0.95e9).is_better_than(trial(1.0, None, 1e9))
    assert trial(1.0).is_better_than(trial(0.95, "fp8"))
    assert not trial(1.0).is_better_than(trial(0.9, "fp8"))
    assert trial(0.98, "fp8").is_better_than(trial(1.0, "fp8"))


def test_without_settings_that_fit_the_search_says_so(search):
    result = search(9.0)
    result.run(1.0)
    assert result.best is None
    assert result.too_large > 3
    (line,) = search_lines(result)
    assert line.startswith("no settings fit: 0 tried")


def test_a_search_at_its_time_limit_keeps_its_results_and_counts_untried_candidates(search):
    result = search(20.0)
    result.run(0.0)
    assert result.best is None
    assert result.untried > 0


def test_an_interrupted_search_keeps_its_results_and_counts_the_rest(search):
    compiler = FakeCompiler(cost)

    def interrupted(asked, timeout, progress):
        if compiler.compiled == 6:
            raise StoppedError
        return compiler(asked, timeout)

    result = search(20.0, interrupted)
    with pytest.raises(StoppedError):
        result.run(1.0)
    assert result.best is not None
    assert result.untried > 5
