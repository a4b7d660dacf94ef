"""Fixture with the fake Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hf.fake_hub import FakeHub


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub on this machine; fails the test if it receives an unknown request."""
    hub = FakeHub(tmp_path)
    yield hub
    hub.close()
    assert hub.surprises == []
