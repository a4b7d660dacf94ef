"""One cluster for all tests of a module, without jobs before and after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, running_cluster


@pytest.fixture(scope="module")
def _running() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(_running: Cluster) -> Iterator[Cluster]:
    yield _running
    _running.end_jobs()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder from which jobs are submitted, on storage that both nodes share."""
    return tmp_path
