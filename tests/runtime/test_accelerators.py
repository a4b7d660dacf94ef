"""Table of accelerators, look-up by name, and detection on this machine; without JAX."""

import pytest

from lmtrain.runtime import accelerators
from lmtrain.runtime.accelerators import ACCELERATORS, find_accelerator, has_accelerator, is_cpu_only, keep_to_cpus


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A10G", "NVIDIA A10G"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA B200", "NVIDIA B200"),
        ("NVIDIA GB200", "NVIDIA GB200"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU v4", "TPU v4"),
        ("v5p", "TPU v5p"),
        ("cpu", None),
    ],
)
def test_devices_are_found_by_complete_words_of_their_names(kind, name):
    found = find_accelerator(kind)
    assert (found and found.name) == name


def test_every_figure_is_plausible():
    for kind, one in ACCELERATORS.items():
        assert one.kind == kind
        assert 50e12 < one.peak_flops < 1e16, kind
        assert 2**34 <= one.memory < 2**38, kind
        assert 2e11 < one.memory_bandwidth < 1e13, kind
        assert one.dcn_bandwidth < one.link_bandwidth < one.memory_bandwidth, kind


@pytest.mark.parametrize(
    ("platforms", "installed", "device", "expected"),
    [
        ("cpu", ("jax_plugins",), True, True),
        ("cuda", (), False, False),
        ("cuda,cpu", (), False, False),
        (None, (), True, True),
        ("", (), True, True),
        (None, ("jax_plugins",), True, False),
        (None, ("libtpu",), True, False),
        (None, ("jax_plugins", "libtpu"), False, True),
    ],
)
def test_cpu_only_if_set_or_without_a_device_or_a_plugin(monkeypatch, platforms, installed, device, expected):
    monkeypatch.setattr(accelerators, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(accelerators, "has_accelerator", lambda: device)
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
