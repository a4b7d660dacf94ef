"""The test families on meshes: patterns of layers and auxiliary losses give the same on 1 and on 8 devices."""

import json
from pathlib import Path

import pytest
from forked import fake_devices, run_script

pytestmark = pytest.mark.multi_device
SCRIPT = Path(__file__).with_name("steps_on_meshes.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    output = folder / "found.json"
    run_script(SCRIPT.read_text(), output, folder=folder, seconds=500, XLA_FLAGS=fake_devices(8))
    return json.loads(output.read_text())


@pytest.mark.parametrize("model", ["window", "auxiliary"])
def test_metrics_and_gradients_equal_those_of_one_device(found, model):
    cases = {name: case for name, case in found.items() if name.startswith(f"{model}, ")}
    assert len(cases) == 3
    expected = cases[f"{model}, one"]["metrics"]
    assert ("train/routed" in expected) == (model != "window")
    for name, case in cases.items():
        assert case["metrics"] == pytest.approx(expected, rel=1e-5), name
        assert max(case["errors"]) < 1e-5, name
