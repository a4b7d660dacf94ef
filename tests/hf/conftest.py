"""The hub of the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hf.fake_hub import FakeHub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub on this machine; asked for something that it does not speak, it fails the test."""
    hub = FakeHub(tmp_path)
    yield hub
    hub.close()
    assert hub.surprises == []
