"""The host as the doctor reports it: each limit that would stop a run is BAD or noted, with a fix."""

import resource

import pytest

from lmtrain.commands import doctor
from lmtrain.commands.doctor import Finding, look_at_machine


def look() -> dict[str, Finding]:
    return {finding.what: finding for finding in look_at_machine()}


def test_this_machine_has_no_problem_and_versions_are_those_installed():
    found = look()
    assert [finding for finding in found.values() if finding.state == "BAD"] == []
    import jax

    assert f"jax {jax.__version__}" in found["libraries"].seen
    assert "cores" in found["host"].seen
    assert "memory free" in found["host"].seen


@pytest.mark.parametrize(("found", "seen"), [(None, "flax is missing"), ("0.0.1", "flax is 0.0.1, required is >=")])
def test_a_library_that_is_missing_or_too_old_is_bad(monkeypatch, found, seen):
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: found if name == "flax" else real(name))
    libraries = look()["libraries"]
    assert libraries.state == "BAD"
    assert seen in libraries.seen
    assert "pip install" in libraries.fix


def test_libraries_of_extras_are_not_required(monkeypatch):
    real = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name in ("ray", "torch", "trackio") else real(name)
    )
    assert look()["libraries"].state == "ok"


@pytest.mark.parametrize(
    ("limit", "value", "what", "state"),
    [
        (resource.RLIMIT_NOFILE, (256, 4096), "open files", "note"),
        (resource.RLIMIT_NOFILE, (4096, 4096), "open files", "ok"),
        (resource.RLIMIT_NOFILE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), "open files", "ok"),
        (resource.RLIMIT_FSIZE, (1 << 20, 1 << 20), "file size", "BAD"),
    ],
)
def test_limits_of_the_system(monkeypatch, limit, value, what, state):
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda kind: value if kind == limit else real(kind))
    finding = look()[what]
    assert finding.state == state
    assert bool(finding.fix) == (state != "ok")


def test_a_full_disk_is_noted(monkeypatch):
    usage = doctor.shutil.disk_usage("/")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert look()["disk"].state == "note"
