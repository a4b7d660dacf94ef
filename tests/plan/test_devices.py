"""Descriptions of GPUs for XLA's compiler."""

import pytest

from lmtrain.plan.worker import target_config
from lmtrain.runtime.accelerators import KINDS


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("v")])
def test_every_kind_of_gpu_has_a_target_config(kind):
    text = target_config(kind)
    assert "core_count" in text
    assert text.count("{") == text.count("}")
