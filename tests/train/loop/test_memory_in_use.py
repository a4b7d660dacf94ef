"""Memory in use by a run, as reported by its devices and the operating system."""

import resource
from types import SimpleNamespace

import pytest

from lmtrain.train.loop import reporter as module
from lmtrain.train.loop.reporter import memory_in_use

HOST = "memory/host_peak_bytes"


def device(number: int, stats: dict | None) -> SimpleNamespace:
    return SimpleNamespace(id=number, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"bytes_in_use": 10, "peak_bytes_in_use": 2**40, "bytes_limit": 100}, {"bytes": 10.0, "peak_bytes": 2.0**40}),
        ({"bytes_in_use": 5}, {"bytes": 5.0}),
        ({"bytes_limit": 100}, {}),
        (None, {}),
    ],
)
def test_each_device_has_the_bytes_that_it_reports_by_its_id(stats, expected):
    metrics = memory_in_use([device(0, stats), device(3, stats)])
    assert {type(value) for value in metrics.values()} == {float}
    assert metrics.pop(HOST) > 0
    assert metrics == {f"memory/device_{number}/{name}": value for number in (0, 3) for name, value in expected.items()}


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_the_peak_depends_on_the_operating_system(monkeypatch, platform, unit):
    monkeypatch.setattr(module.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=123_456))
    assert memory_in_use([]) == {HOST: 123_456.0 * unit}
