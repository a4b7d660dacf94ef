"""Cores of this process: those it may run on, and no more than their time that its container has."""

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
def test_a_containers_share_of_time_counts(monkeypatch, tmp_path, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cores, "_QUOTA", str(tmp_path / "cpu.max"))
    assert usable_cores() == expected


def test_without_control_groups_it_is_the_affinity(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "_QUOTA", str(tmp_path / "none"))
    assert usable_cores() == len(os.sched_getaffinity(0))
