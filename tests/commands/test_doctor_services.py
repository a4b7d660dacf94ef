"""Storage and services: real files, a real server on this machine, and no token in any output."""

import http.server
import os
import threading

import fsspec
import pytest

from lmtrain.commands import doctor
from lmtrain.commands.doctor import Finding, look_at_place, look_at_services

SECRET = "s3cr3t" * 7


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("", "{0}: written, listed, read and deleted in "),
        ("a/b", "{0}/a/b: does not exist yet, can be created; {0}: written"),
        ("~/checkpoints", "{0}/checkpoints: does not exist yet, can be created"),
    ],
)
def test_a_folder_is_tested_and_not_changed_or_created(tmp_path, monkeypatch, name, seen):
    monkeypatch.setenv("HOME", str(tmp_path))
    finding = look_at_place(name if name.startswith("~") else str(tmp_path / name))
    assert finding.state == "ok"
    assert finding.seen.startswith(seen.format(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["trian.jsonl", "my*.jsonl", "config.yaml", "shard.{1..3}.jsonl.gz"])
def test_a_missing_file_is_bad(tmp_path, name):
    finding = look_at_place(str(tmp_path / name))
    assert (finding.state, finding.seen) == ("BAD", f"{tmp_path}/{name}: no such file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("size", "seen"), [(5, "a file of 5 B, readable in "), (1 << 40, "a file of 1.00 TiB")])
def test_only_the_start_of_a_file_is_read(tmp_path, size, seen):
    with open(tmp_path / "config.yaml", "wb") as file:
        file.truncate(size)
    assert look_at_place(str(tmp_path / "config.yaml")).seen.startswith(f"{tmp_path}/config.yaml: {seen}")


def test_a_bucket_is_tested_and_left_unchanged():
    assert look_at_place("memory://doctor/place").state == "ok"
    assert fsspec.filesystem("memory").find("doctor") == []


@pytest.mark.parametrize("place", ["nosuch://x", "/proc/nothing/here", "/dev/null/x"])
def test_a_place_without_write_permission_is_bad(place):
    finding = look_at_place(place)
    assert finding.state == "BAD"
    assert place in finding.seen


def test_a_store_that_returns_other_bytes_is_bad(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "read_bytes", lambda path: b"")
    finding = look_at_place(str(tmp_path))
    assert finding.state == "BAD"
    assert "the bytes read differ" in finding.seen


@pytest.fixture
def server():
    """The address of a server that answers every request with 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """`wandb(NAME=value)`: the finding with these environment variables and an empty home folder."""

    def look(**environment):
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return next(finding for finding in look_at_services() if finding.what == "wandb")

    return look


@pytest.mark.parametrize(
    ("environment", "state", "seen"),
    [
        ({}, "note", "no API key: runs log offline"),
        ({"WANDB_MODE": "disabled"}, "note", "WANDB_MODE is disabled"),
        ({"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": "SERVER"}, "ok", "API key found, SERVER responds"),
        (
            {"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            "note",
            "API key found, but http://127",
        ),
    ],
)
def test_wandb_and_its_server_are_looked_at_without_showing_the_key(wandb, server, environment, state, seen):
    finding = wandb(**{name: value.replace("SERVER", server) for name, value in environment.items()})
    assert finding.state is state
    assert finding.seen.startswith(seen.replace("SERVER", server))
    assert SECRET not in "".join(finding.lines())
    assert ("unreachable" in finding.seen) == ("127.0.0.1:9" in environment.get("WANDB_BASE_URL", ""))


def test_an_offline_hub_is_noted():
    hub = next(finding for finding in look_at_services() if finding.what == "hub")
    assert (hub.state, hub.seen) == ("note", "offline: HF_HUB_OFFLINE is set")


def test_a_finding_shows_no_secrets():
    found = look_at_place("nonsense://me:planted@host/a?sig=planted")
    assert "planted" not in "".join(found.lines())
    found = Finding(what="wandb", seen="https://me:planted@host is unreachable")
    assert found.lines() == ["ok   wandb        https://***@host is unreachable"]
