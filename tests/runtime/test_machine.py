"""This machine: CPU cores, accelerators, and the memory that malloc keeps."""

import os
import subprocess
import sys

import pytest

from lmtrain.runtime import machine
from lmtrain.runtime.machine import has_accelerator, is_cpu_only, keep_to_cpus, usable_cores


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("", 8)])
def test_the_quota_of_a_container_limits_the_cores(monkeypatch, tmp_path, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "_QUOTA", str(tmp_path / "cpu.max"))
    assert usable_cores() == expected


@pytest.mark.parametrize(
    ("platforms", "installed", "device", "expected"),
    [
        ("cpu", ("jax_plugins",), True, True),
        ("cuda,cpu", (), False, False),
        (None, (), True, True),
        (None, ("libtpu",), True, False),
        (None, ("jax_plugins", "libtpu"), False, True),
    ],
)
def test_cpu_only_if_set_or_without_a_device_or_a_plugin(monkeypatch, platforms, installed, device, expected):
    monkeypatch.setattr(machine, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(machine, "has_accelerator", lambda: device)
    environment = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    assert is_cpu_only(environment) is expected
    keep_to_cpus(environment)
    assert environment.get("JAX_PLATFORMS", "") == (platforms or ("cpu" if expected else ""))


def test_a_device_is_detected_in_dev_or_on_the_pci_bus(tmp_path):
    pci, devices = tmp_path / "pci", tmp_path / "dev"
    (pci / "0000:00:04.0").mkdir(parents=True)
    devices.mkdir()
    vendor = pci / "0000:00:04.0" / "vendor"
    vendor.write_text("0x8086\n")
    assert not has_accelerator(str(pci), str(devices))
    vendor.write_text("0x1ae0\n")  # Google
    assert has_accelerator(str(pci), str(devices))
    vendor.unlink()
    (devices / "nvidia0").touch()
    assert has_accelerator(str(pci), str(devices))


FAULTS = """
import resource, sys
import numpy as np
from lmtrain.runtime.machine import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(8 << 20, np.uint8) for _ in range(8)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del blocks
print(faults)
"""


def test_freed_memory_is_not_mapped_again():
    """With transparent huge pages there is less than one fault per 4 KiB, but more than none."""
    command = [sys.executable, "-c", FAULTS]
    kept, default = (int(subprocess.check_output([*command, word])) for word in ("keep", "default"))
    assert kept < 10
    assert default > 3 * kept + 20
