"""The choice of the executor that builds shards."""

import importlib.util

import pytest

from lmtrain.preprocess.executor import choose_executor
from lmtrain.run.execution import RayConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE, Processes
from lmtrain.runtime.machine import usable_cores

SEVERAL = Processes(1, 3, "host:1234")


@pytest.fixture(autouse=True)
def _no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def label(ray=None, workers=None, processes=ALONE):
    return choose_executor(ray or RayConfig(), workers, processes).label


def test_one_process_without_an_address_builds_locally():
    assert label() == f"{usable_cores()} local processes"
    assert label(workers=7) == "7 local processes"


def test_an_address_or_several_processes_mean_ray(monkeypatch):
    assert label(RayConfig(address="a:1")) == "the Ray cluster at a:1"
    assert label(processes=SEVERAL) == "a Ray cluster on the 3 hosts of the run"
    monkeypatch.setenv("RAY_ADDRESS", "b:2")
    assert label() == "the Ray cluster at b:2"
    assert label(RayConfig(address="a:1")) == "the Ray cluster at a:1"


@pytest.mark.parametrize(
    ("ray", "processes", "why"),
    [(RayConfig(address="a:1"), ALONE, "ray at a:1"), (RayConfig(), SEVERAL, "a run of 3 processes")],
)
def test_without_ray_installed_the_extra_is_named(monkeypatch, ray, processes, why):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=rf"{why} preprocesses on Ray, which is not installed: pip install 'lmtrain\[ray\]'"
    ):
        choose_executor(ray, None, processes)


def test_several_processes_without_a_cluster_are_a_user_error():
    executor = choose_executor(RayConfig(auto_start_cluster=False), None, SEVERAL)
    with (
        pytest.raises(UserError, match=r"trainer\.ray: .* auto_start_cluster is false; set address"),
        executor.helping(),
    ):
        pass


def test_start_workers_false_joins_no_workers():
    """A Ray node would be a process: none is started for an existing cluster."""
    ray = RayConfig(address="127.0.0.1:1", start_workers=False)
    import subprocess

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *arguments, **keywords: pytest.fail("a node was started"))
        with choose_executor(ray, None, SEVERAL).helping() as address:
            assert address == "127.0.0.1:1"
