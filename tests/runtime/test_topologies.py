"""Topologies from the flags `--device`, `--topology`, `--devices`, `--hosts` and `--slices`."""

import pytest

from lmtrain.runtime.accelerators import find_topology
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    ("flags", "shape", "slices"),
    [
        ({"device": "H100", "devices": 8}, (8,), 1),
        ({"device": "h100", "devices": 16}, (8,), 2),
        ({"device": "h100", "devices": 16, "hosts": 4}, (4,), 4),
        ({"device": "v5p"}, (2, 2, 1), 1),
        ({"device": "v5e", "devices": 1}, (1, 1), 1),
        ({"device": "v5e", "topology": "4x2"}, (2, 4), 1),
        ({"device": "v5p", "topology": "4x12x8"}, (4, 8, 12), 1),
        ({"device": "v5p", "devices": 128, "slices": 2}, (4, 4, 4), 2),
        ({"device": "v5p-128"}, (4, 4, 4), 1),
        ({"device": "v5litepod-16"}, (4, 4), 1),
        ({"device": "v6e-8", "slices": 2}, (2, 4), 2),
        ({"device": "v6e", "hosts": 4}, (4, 4), 1),
    ],
)
def test_the_topology_for_flags(flags, shape, slices):
    found = find_topology(**flags)
    assert (found.shape, found.slices) == (shape, slices)
    assert len(found.slice_ids) == found.num_devices
    assert len(set(found.slice_ids)) == slices


def test_which_dimensions_of_a_slice_wrap_around():
    assert find_topology("v5p-128").wrap == (True, True, True)
    assert find_topology("v5p", "2x4x4").wrap == (False, False, False)
    assert find_topology("v5e", "8x16").wrap == (False, True, False)
    assert find_topology("v6e", "16x16").wrap == (True, True, False)
    assert find_topology("v5e", devices=1).host_bounds == (1, 1, 1)
    assert find_topology("v6e-8", slices=2).name == "2 slices of 2x4"
    assert find_topology("h100", devices=16).name == "2 hosts of 8"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"device": "h10"}, ["h10", "h100?"]),
        ({"device": "h100-8"}, ["h100-8"]),
        ({"device": "v5p", "topology": "5x5x5"}, ["5x5x5", "4x4x8"]),
        ({"device": "v5e", "topology": "nonsense"}, ["nonsense", "1x1"]),
        ({"device": "v5e", "devices": 12}, ["12", "8 (2x4, v5e-8)", "16 (4x4, v5e-16)"]),
        ({"device": "v5p-100"}, ["v5p-100", "50 chips", "32 (2x4x4, v5p-64)", "64 (4x4x4, v5p-128)"]),
        ({"device": "v5p-128", "topology": "2x2x2"}, ["v5p-128", "16 cores"]),
        ({"device": "h100", "devices": 100_000}, ["100,000", "65,536"]),
        ({"device": "v5p-7"}, ["v5p-7", "3.5 chips", "v5p-8"]),
        ({"device": "v5p", "topology": "4x4x4", "devices": 8}, ["--devices 8", "64 chips"]),
        ({"device": "v5p", "devices": 6, "slices": 4}, ["--devices 6", "4 slices", "4 or 8"]),
        ({"device": "v5e", "topology": "4x4", "hosts": 3}, ["--hosts 3", "4 hosts"]),
        ({"device": "h100", "topology": "2x2"}, ["--topology", "--devices"]),
        ({"device": "h100", "devices": 10, "hosts": 4}, ["--devices 10", "8 or 12"]),
        ({"device": "h100", "devices": 16, "hosts": 1}, ["--hosts 1", "2 hosts of 8"]),
        ({"device": "h100", "hosts": 2, "slices": 2}, ["--slices", "--hosts"]),
    ],
)
def test_unsupported_topologies_are_refused_with_the_supported_ones(flags, parts):
    with pytest.raises(UserError) as caught:
        find_topology(**flags)
    assert [part for part in parts if part not in str(caught.value)] == []
