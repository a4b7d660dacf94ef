"""CPU cores of this process: its affinity, limited by the CPU quota of its container."""

import os

import pytest

from lmtrain.runtime import cores
from lmtrain.runtime.cores import usable_cores


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 8),
        ("", 8),
    ],
)
def test_the_quota_of_a_container_limits_the_cores(monkeypatch, tmp_path, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cores, "_QUOTA", str(tmp_path / "cpu.max"))
    assert usable_cores() == expected


def test_without_cgroups_the_affinity_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "_QUOTA", str(tmp_path / "none"))
    assert usable_cores() == len(os.sched_getaffinity(0))
