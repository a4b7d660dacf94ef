"""Figures of a compiled step as plain data."""

from types import SimpleNamespace

import pytest

from lmtrain.plan.figures import memory_of


@pytest.mark.parametrize(
    ("platform", "compiler", "peak"), [("tpu", 500, 500), ("gpu", 5000, 950), ("cpu", 500, 950), ("tpu", 0, 950)]
)
def test_the_peak_of_memory_depends_on_what_the_compiler_counts(platform, compiler, peak):
    stats = {"argument": 400, "output": 300, "alias": 250, "temp": 500, "host_temp": 7, "host_argument": 1}
    values = {f"{name}_size_in_bytes": size for name, size in stats.items()} | {"peak_memory_in_bytes": compiler}
    memory = memory_of(SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**values)), platform)
    assert memory == {"arguments": 400, "temporary": 500, "peak": peak, "total": 950, "host": 8}
