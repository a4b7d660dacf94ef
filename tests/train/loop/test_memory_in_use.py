"""Memory in use by a run, as reported by its devices and the operating system."""

import resource
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmtrain.train.loop import memory_in_use as module
from lmtrain.train.loop.memory_in_use import memory_in_use

HOST = "memory/host_peak_bytes"


def device(number: int, stats: dict | None) -> SimpleNamespace:
    return SimpleNamespace(id=number, memory_stats=lambda: stats)


def test_each_device_has_current_and_peak_bytes_by_its_id():
    devices = [
        device(0, {"bytes_in_use": 10, "peak_bytes_in_use": 30, "bytes_limit": 100}),
        device(3, {"bytes_in_use": 0, "peak_bytes_in_use": 2**40}),
    ]
    found = memory_in_use(devices)
    assert found.pop(HOST) > 0
    assert found == {
        "memory/device_0/bytes": 10.0,
        "memory/device_0/peak_bytes": 30.0,
        "memory/device_3/bytes": 0.0,
        "memory/device_3/peak_bytes": 2.0**40,
    }


@pytest.mark.parametrize("stats", [None, {}, {"bytes_limit": 100}])
def test_a_device_without_memory_stats_has_no_metrics(stats):
    assert memory_in_use([device(0, stats)]).keys() == {HOST}


def test_a_device_that_reports_one_of_the_two_has_only_that():
    assert memory_in_use([device(1, {"bytes_in_use": 5})]).keys() == {"memory/device_1/bytes", HOST}


def test_the_metrics_of_this_machine_are_floats():
    found = memory_in_use(jax.local_devices())
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.skipif(sys.platform != "linux", reason="the system's own figure is read from /proc")
def test_the_peak_of_the_host_is_that_of_the_system_and_never_decreases():
    before = memory_in_use([])[HOST]
    ballast = np.ones(int(before / 8) + 2**22)  # more than the peak so far, with every page touched
    after = memory_in_use([])[HOST]
    assert after > before + 2**24
    del ballast
    with open("/proc/self/status") as file:
        (peak,) = (int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    assert memory_in_use([])[HOST] == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_the_peak_depends_on_the_operating_system(monkeypatch, platform, unit):
    monkeypatch.setattr(module.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=123_456))
    assert memory_in_use([]) == {HOST: 123_456.0 * unit}
