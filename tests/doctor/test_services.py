"""Storage and services: real files, a real server on this machine, and no token in any output."""

import http.server
import os
import threading

import fsspec
import pytest

from lmtrain.doctor import services
from lmtrain.doctor.finding import State
from lmtrain.doctor.services import look_at_place, look_at_services

SECRET = "s3cr3t" * 7


def test_a_folder_is_tested_and_left_unchanged(tmp_path):
    finding = look_at_place(str(tmp_path))
    assert finding.state is State.OK
    assert finding.seen.startswith(f"{tmp_path}: written, listed, read and deleted in ")
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_not_created(tmp_path):
    finding = look_at_place(str(tmp_path / "a" / "b"))
    assert finding.state is State.OK
    assert finding.seen.startswith(f"{tmp_path}/a/b: does not exist yet, can be created; {tmp_path}: written")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["trian.jsonl", "my*.jsonl", "config.yaml", "shard.{1..3}.jsonl.gz"])
def test_a_missing_file_is_bad(tmp_path, name):
    finding = look_at_place(str(tmp_path / name))
    assert (finding.state, finding.seen) == (State.BAD, f"{tmp_path}/{name}: no such file")
    assert os.listdir(tmp_path) == []


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert look_at_place("~/checkpoints").seen.startswith(f"{tmp_path}/checkpoints: does not exist yet, can be created")


def test_only_the_start_of_a_large_file_is_read(monkeypatch, tmp_path):
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(1 << 40)
    assert look_at_place(str(tmp_path / "large.bin")).seen.startswith(f"{tmp_path}/large.bin: a file of 1.00 TiB")


def test_a_bucket_is_tested_and_left_unchanged():
    assert look_at_place("memory://doctor/place").state is State.OK
    assert fsspec.filesystem("memory").find("doctor") == []


def test_a_file_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    finding = look_at_place(str(tmp_path / "config.yaml"))
    assert finding.seen.startswith(f"{tmp_path}/config.yaml: a file of 5 B, readable in ")


@pytest.mark.parametrize("place", ["nosuch://x", "/proc/nothing/here", "/dev/null/x"])
def test_a_place_without_write_permission_is_bad(place):
    finding = look_at_place(place)
    assert finding.state is State.BAD
    assert place in finding.seen


def test_a_store_that_returns_other_bytes_is_bad(monkeypatch, tmp_path):
    monkeypatch.setattr(services, "read_bytes", lambda path: b"")
    finding = look_at_place(str(tmp_path))
    assert finding.state is State.BAD
    assert "the bytes read differ" in finding.seen


@pytest.fixture
def server():
    """The address of a server that answers every request with 404."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


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


def test_wandb_without_a_key_is_noted(wandb):
    assert wandb().seen == "no API key: runs log offline"


def test_wandb_with_a_key_and_a_server_that_responds_is_ok(wandb, server):
    finding = wandb(WANDB_API_KEY=SECRET, WANDB_BASE_URL=server)
    assert (finding.state, finding.seen) == (State.OK, f"API key found, {server} responds")
    assert SECRET not in "".join(finding.lines())


def test_an_unreachable_wandb_is_noted(wandb):
    finding = wandb(WANDB_API_KEY=SECRET, WANDB_BASE_URL="http://127.0.0.1:9")
    assert finding.state is State.NOTE
    assert "unreachable" in finding.seen
    assert SECRET not in "".join(finding.lines())


def test_a_disabled_wandb_is_noted(wandb):
    assert wandb(WANDB_MODE="disabled").seen == "WANDB_MODE is disabled"


def test_an_offline_hub_is_noted():
    hub = next(finding for finding in look_at_services() if finding.what == "hub")
    assert (hub.state, hub.seen) == (State.NOTE, "offline: HF_HUB_OFFLINE is set")
