"""Fixture with the fake Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hf.fake_hub import FakeHub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub on this machine; fails the test if it receives an unknown request."""
    hub = FakeHub(tmp_path)
    yield hub
    hub.close()
    assert hub.surprises == []
