"""Table of accelerators, and look-up by name."""

import pytest

from lmtrain.runtime.accelerators import ACCELERATORS, find_accelerator


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
    for kind, accelerator in ACCELERATORS.items():
        assert accelerator.kind == kind
        assert 50e12 < accelerator.peak_flops < 1e16, kind
        assert 2**34 <= accelerator.memory < 2**38, kind
        assert 2e11 < accelerator.memory_bandwidth < 1e13, kind
        assert all(1.9 < rate / accelerator.peak_flops < 2.1 for rate in accelerator.eight_bit.values()), kind
        assert accelerator.dcn_bandwidth < accelerator.link_bandwidth < accelerator.memory_bandwidth, kind
