"""Table of accelerators, and look-up by name."""

import pytest

from lmtrain.runtime.accelerators import find_accelerator


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200"),
        ("NVIDIA RTX A1000", None),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("v5p", "TPU v5p"),
        ("cpu", None),
    ],
)
def test_devices_are_found_by_complete_words_of_their_names(kind, name):
    found = find_accelerator(kind)
    assert (found and found.name) == name
