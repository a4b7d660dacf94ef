"""Settings of several processes and of Ray."""

import pytest
from pydantic import ValidationError

from lmtrain.runtime.config import DistributedConfig, RayConfig


def test_nothing_is_set_unless_asked():
    assert set(DistributedConfig().model_dump(exclude={"heartbeat_timeout"}).values()) == {None}
    assert RayConfig().model_dump() == {"address": None, "start_workers": True, "auto_start_cluster": True}


@pytest.mark.parametrize("devices", [0, [0, 1], None])
def test_local_devices_are_one_several_or_all(devices):
    assert DistributedConfig(local_device_ids=devices).local_device_ids == devices


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process_id": 0}, "needs num_processes too"),
        ({"process_id": 2, "num_processes": 2}, "processes are numbered 0 to 1"),
        ({"process_id": -1, "num_processes": 2}, "greater than or equal to 0"),
        ({"num_processes": 0}, "greater than or equal to 1"),
    ],
)
def test_process_numbers_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DistributedConfig(**settings)
