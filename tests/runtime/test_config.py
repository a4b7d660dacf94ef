"""Settings of multi-process runs and of Ray."""

import pytest
from pydantic import ValidationError

from lmtrain.runtime.config import DistributedConfig, RayConfig


@pytest.mark.parametrize("devices", [0, [0, 1], None])
def test_local_device_ids_are_one_several_or_null(devices):
    assert DistributedConfig(local_device_ids=devices).local_device_ids == devices


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process_id": 0}, "requires num_processes"),
        ({"process_id": 2, "num_processes": 2}, "expected 0 to 1"),
        ({"process_id": -1, "num_processes": 2}, "greater than or equal to 0"),
        ({"num_processes": 0}, "greater than or equal to 1"),
    ],
)
def test_invalid_process_ids_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DistributedConfig(**settings)


@pytest.mark.parametrize(("process", "processes"), [(0, 1), (1, 2), (0, 2), (None, 2)])
def test_process_ids_start_at_0(process, processes):
    config = DistributedConfig(coordinator_address="host:1234", num_processes=processes, process_id=process)
    assert (config.num_processes, config.process_id) == (processes, process)


@pytest.mark.parametrize("devices", ["all", 1.5, [0.5], {}, True])
def test_local_device_ids_are_integers(devices):
    with pytest.raises(ValidationError):
        DistributedConfig(local_device_ids=devices)


@pytest.mark.parametrize(("section", "misspelt"), [(DistributedConfig, "processes"), (RayConfig, "adress")])
def test_an_unknown_setting_is_refused(section, misspelt):
    with pytest.raises(ValidationError, match=rf"{misspelt}\n *Extra inputs"):
        section(**{misspelt: None})


@pytest.mark.parametrize("setting", ["start_workers", "auto_start_cluster"])
def test_a_switch_of_ray_is_true_or_false(setting):
    assert getattr(RayConfig(**{setting: False}), setting) is False
    with pytest.raises(ValidationError):
        RayConfig(**{setting: None})
