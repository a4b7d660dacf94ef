"""Settings of multi-process runs."""

import pytest
from pydantic import ValidationError

from lmtrain.run.execution import DistributedConfig


def test_valid_settings_are_kept():
    settings = {"coordinator_address": "host:1234", "num_processes": 2, "process_id": 1, "local_device_ids": 0}
    assert settings.items() <= DistributedConfig(**settings).model_dump().items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process_id": 0}, "num_processes"),
        ({"process_id": 2, "num_processes": 2}, "0 to 1"),
        *(({"local_device_ids": devices}, "local_device_ids") for devices in ("all", [0.5], True)),
        ({"heartbeat_timeout": "0.5s"}, "1s"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DistributedConfig(**settings)
