"""Devices as the doctor reports them: with simulated tools and answers of other machines, and with the real JAX."""

import pytest

from lmtrain.commands import doctor
from lmtrain.commands.doctor import look_at_devices

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


@pytest.mark.parametrize(("platforms", "fix"), [("", "lmtrain[cuda12]"), ("cpu", "unset JAX_PLATFORMS, which is cpu")])
def test_a_gpu_that_jax_does_not_use_is_bad(play, monkeypatch, platforms, fix):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    _, finding = play("NVIDIA A100, 40960 MiB, 535.1", CPU)
    assert finding.state == "BAD"
    assert fix in finding.fix


def test_a_driver_that_fails_is_bad(play):
    finding = play("Failed to initialize NVML: Driver/library version mismatch", CPU, code=18)[0]
    assert finding.state == "BAD"
    assert finding.seen == "Failed to initialize NVML: Driver/library version mismatch"


def test_a_driver_without_a_gpu_is_noted(play):
    assert (play("", CPU)[0].seen, play("", CPU)[0].state) == ("no GPU", "note")


@pytest.mark.parametrize("has_tpu", [True, False])
def test_a_tpu_that_jax_does_not_use_is_bad_and_a_compiler_for_tpus_alone_is_not(play, monkeypatch, has_tpu):
    monkeypatch.setattr(doctor, "has_tpu", lambda: has_tpu)
    finding = play(None, CPU)[0]
    assert (finding.state == "BAD") == ("lmtrain[tpu]" in finding.fix) == has_tpu


@pytest.mark.parametrize(
    ("jax", "seen"),
    [
        ("no response within 120 s", "JAX finds none: no response within 120 s"),
        (
            H100 | {"right": False},
            "8 x NVIDIA H100 80GB HBM3 (gpu, 80.0 GiB each): wrong result of a small matrix product",
        ),
    ],
)
def test_jax_without_a_response_and_a_device_that_computes_wrongly_are_bad(play, jax, seen):
    (finding,) = play(None, jax)
    assert (finding.state, finding.seen) == ("BAD", seen)


def test_a_process_that_does_not_respond_is_killed(monkeypatch):
    monkeypatch.setattr(doctor, "_ASK", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "_DEVICE_SECONDS", 0.2)
    assert doctor._ask_jax() == "no response within 0 s"


def test_the_last_line_of_jaxs_error_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "_ASK", "raise RuntimeError('no backend')")
    assert doctor._ask_jax() == "RuntimeError: no backend"
