"""What the doctor finds: devices, the host, launchers, storage and services.

With simulated tools and answers of other machines, and with the real ones of this machine; no output has a secret.
"""

import os
import resource
from functools import partial

import pytest
from web import QuietFiles, serving

from lmtrain.commands import doctor
from lmtrain.commands.doctor import (
    Finding,
    look_at_cluster,
    look_at_devices,
    look_at_machine,
    look_at_place,
    look_at_services,
)
from lmtrain.runtime.distributed import detects_others

H100 = {"backend": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 8, "memory": 80 << 30, "right": True}
CPU = {"backend": "cpu", "kind": "cpu", "count": 1, "memory": None, "right": True}


@pytest.fixture
def play(monkeypatch, tmp_path):
    """`play(nvidia=..., jax=...)`: the simulated output of nvidia-smi (None: not installed) and answer of JAX."""

    def set_up(nvidia: str | None, jax: dict | str, code: int = 0) -> list:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        if nvidia is not None:
            tool = folder / "nvidia-smi"
            tool.write_text(f"#!/bin/sh\ncat <<'END'\n{nvidia}\nEND\nexit {code}\n")
            tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin" if nvidia is not None else str(folder))
        monkeypatch.setattr(doctor, "_ask_jax", lambda: jax)
        monkeypatch.setattr(doctor, "glob", lambda pattern: [])
        return list(look_at_devices())

    return set_up


def test_the_device_of_this_machine_computes():
    found = list(look_at_devices())
    assert [(finding.what, finding.state) for finding in found] == [("devices", "ok"), ("peak", "note")]
    assert "x cpu (cpu)" in found[0].seen


def test_a_machine_with_gpus_that_jax_uses(play):
    found = play("NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06\n" * 8, H100)
    assert [finding.state for finding in found] == ["ok"] * 3
    assert found[0].seen == "8 x NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"
    assert found[1].seen == "8 x NVIDIA H100 80GB HBM3 (gpu, 80.0 GiB each)"
    assert found[2].seen.startswith("989 TFLOP/s")


@pytest.mark.parametrize(("platforms", "fix"), [("", "jax[cuda12]"), ("cpu", "JAX_PLATFORMS")])
def test_a_gpu_that_jax_does_not_use_is_bad(play, monkeypatch, platforms, fix):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    _, finding = play("NVIDIA A100, 40960 MiB, 535.1", CPU)
    assert finding.state == "BAD"
    assert fix in finding.fix


@pytest.mark.parametrize("has_tpu", [True, False])
def test_a_tpu_that_jax_does_not_use_is_bad_and_a_compiler_for_tpus_alone_is_not(play, monkeypatch, has_tpu):
    monkeypatch.setattr(doctor, "has_tpu", lambda: has_tpu)
    finding = play(None, CPU)[0]
    assert (finding.state == "BAD") == ("jax[tpu]" in finding.fix) == has_tpu


def test_a_driver_that_fails_jax_without_a_response_and_a_device_that_computes_wrongly_are_bad(play):
    for nvidia, jax in (("Failed to initialize NVML", CPU), (None, "no response"), (None, H100 | {"right": False})):
        assert play(nvidia, jax, code=18)[0].state == "BAD"


def test_a_process_that_does_not_respond_is_killed(monkeypatch):
    monkeypatch.setattr(doctor, "_ASK", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "_DEVICE_SECONDS", 0.2)
    assert doctor._ask_jax() == "no response within 0 s"


def look_at_host() -> dict[str, Finding]:
    return {finding.what: finding for finding in look_at_machine()}


@pytest.mark.parametrize(("found", "seen"), [(None, "flax is missing"), ("0.0.1", "flax is 0.0.1")])
def test_a_library_that_is_missing_or_too_old_is_bad(monkeypatch, found, seen):
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: found if name == "flax" else real(name))
    libraries = look_at_host()["libraries"]
    assert libraries.state == "BAD"
    assert seen in libraries.seen
    assert "pip install" in libraries.fix


@pytest.mark.parametrize(
    ("limit", "value", "what", "state"),
    [
        (resource.RLIMIT_NOFILE, (256, 4096), "open files", "note"),
        (resource.RLIMIT_NOFILE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), "open files", "ok"),
        (resource.RLIMIT_FSIZE, (1 << 20, 1 << 20), "file size", "BAD"),
    ],
)
def test_limits_of_the_system(monkeypatch, limit, value, what, state):
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda kind: value if kind == limit else real(kind))
    finding = look_at_host()[what]
    assert finding.state == state
    assert bool(finding.fix) == (state != "ok")


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}, "one; "),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "Slurm: process 2 of 4"),
        ({"PMI_SIZE": "3"}, "MPI: process ? of 3"),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "3"}, "TPU worker 3 of 4"),
    ],
)
def test_index_and_number_of_processes_are_those_that_a_run_would_use(environment, seen):
    (finding,) = look_at_cluster(environment)
    assert finding.seen.startswith(seen)
    assert finding.state == "ok"
    assert detects_others(environment) == (not seen.startswith("one; "))


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


@pytest.mark.parametrize("name", ["my*.jsonl", "config.yaml", "shard.{1..3}.jsonl.gz"])
def test_a_missing_file_is_bad(tmp_path, name):
    finding = look_at_place(str(tmp_path / name))
    assert (finding.state, finding.seen) == ("BAD", f"{tmp_path}/{name}: no such file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["nosuch://x", "/dev/null/x"])
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
def server(tmp_path):
    with serving(partial(QuietFiles, directory=str(tmp_path))) as address:
        yield f"http://{address}"


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
        ({"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": "SERVER"}, "ok", "API key found, SERVER responds"),
        ({"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "note", "API key found, but http://127"),
    ],
)
def test_wandb_and_its_server_are_looked_at_without_showing_the_key(wandb, server, environment, state, seen):
    finding = wandb(**{name: value.replace("SERVER", server) for name, value in environment.items()})
    assert finding.state is state
    assert finding.seen.startswith(seen.replace("SERVER", server))
    assert SECRET not in "".join(finding.lines())
    assert ("unreachable" in finding.seen) == ("127.0.0.1:9" in environment.get("WANDB_BASE_URL", ""))


def test_a_finding_shows_no_secrets():
    found = look_at_place("nonsense://me:planted@host/a?sig=planted")
    assert "planted" not in "".join(found.lines())
    found = Finding(what="wandb", seen="https://me:planted@host is unreachable")
    assert found.lines() == ["ok   wandb        https://***@host is unreachable"]
