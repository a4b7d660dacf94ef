"""`replica_dcn_axis_size: auto`: a replica in each slice or host if its state fits."""

import pytest
from sharding.test_mesh import FakeDevice

from lmtrain.sharding.config import PartitioningConfig
from lmtrain.train.program.parts import choose_replicas

HOSTS = [FakeDevice(number, number // 8, number // 8, "cuda", "NVIDIA H100") for number in range(32)]
GIB = 2**30


def choose(memory=80 * GIB, state=40 * GIB, devices=HOSTS, **settings):
    """For a state of this size in total, which FSDP splits over `data`."""
    config = PartitioningConfig(**settings)
    return choose_replicas(config, devices, None, lambda layout: state // layout.mesh.shape["data"], memory)


def test_a_state_that_fits_into_each_host_is_replicated():
    assert choose() == (4, "one in each slice or host, whose state takes 5.0 GiB of 80.0 GiB per device")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": 80 * GIB}, "the state of a replica in each slice or host takes 10.0 GiB of 80.0 GiB per device"),
        ({"memory": None}, "the memory of the devices is unknown"),
        ({"devices": HOSTS[:8]}, "one slice or host"),
        ({"context_axis_size": 16}, "a model on 16 devices needs several slices or hosts"),
        ({"expert_axis_size": 16}, "a model on 16 devices needs several slices or hosts"),
        ({"context_axis_size": 8}, "with context parallelism, memory is for activations"),
    ],
)
def test_otherwise_the_state_is_split_across(changes, reason):
    assert choose(**changes) == (1, reason)


@pytest.mark.parametrize(("setting", "number"), [(-1, 4), (1, 1), (2, 2)])
def test_an_explicit_number_is_kept(setting, number):
    assert choose(replica_dcn_axis_size=setting) == (number, "")
