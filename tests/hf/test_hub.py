"""Whether the hub can be reached is found out quickly, and told to its libraries."""

import os
import socket
import time

import pytest

from lmtrain.hf.hub import prepare_hub


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    prepare_hub.cache_clear()
    yield
    prepare_hub.cache_clear()


def test_a_hub_that_does_not_answer_turns_its_libraries_offline_at_once(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    began = time.monotonic()
    assert not prepare_hub()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert time.monotonic() - began < 10


def test_a_hub_that_answers_changes_nothing(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert prepare_hub()
    assert "HF_HUB_OFFLINE" not in os.environ


def test_offline_is_taken_at_its_word(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://a.name.that.is.not.looked.up.invalid")
    assert not prepare_hub()
