"""Which devices there are, before JAX is asked."""

import pytest

from lmtrain.train import devices
from lmtrain.train.devices import is_cpu_only


@pytest.mark.parametrize(
    ("platforms", "installed", "expected"),
    [
        ("cpu", ("jax_plugins",), True),
        ("cuda", (), False),
        ("cuda,cpu", (), False),
        (None, (), True),
        ("", (), True),
        (None, ("jax_plugins",), False),
        (None, ("libtpu",), False),
    ],
)
def test_only_cpus_are_told_or_nothing_else_is_installed(monkeypatch, platforms, installed, expected):
    monkeypatch.setattr(devices, "find_spec", lambda name: object() if name in installed else None)
    assert is_cpu_only({} if platforms is None else {"JAX_PLATFORMS": platforms}) is expected
