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


@pytest.mark.parametrize("model", ["window", "auxiliary", "mixer"])
def test_metrics_and_gradients_equal_those_of_one_device(found, model):
    cases = {name: case for name, case in found.items() if name.startswith(f"{model}, ")}
    assert len(cases) == 3
    expected = cases[f"{model}, one"]["metrics"]
    assert ("train/routed" in expected) == (model == "auxiliary")
    for name, case in cases.items():
        assert case["metrics"] == pytest.approx(expected, rel=1e-5), name
        assert max(case["errors"]) < 1e-5, name


def cases_of(found, model):
    return {name.removeprefix(f"{model}, "): case for name, case in found.items() if name.startswith(f"{model}, ")}


@pytest.mark.parametrize(("model", "meshes"), [("dense in fp8", 3), ("mixed in fp8", 2)])
def test_products_in_fp8_round_the_same_on_every_mesh(found, model, meshes):
    """Scales are powers of two: that each device has its own changes only numbers far below the largest."""
    cases = cases_of(found, model)
    assert len(cases) == meshes
    for name, case in cases.items():
        assert case["metrics"]["train/loss"] == pytest.approx(cases["one"]["metrics"]["train/loss"], rel=1e-5), name
        assert max(case["errors"]) < 1e-3 < max(case["rounding"]), name


def test_products_in_int8_differ_between_meshes_by_their_rounding(found):
    cases = cases_of(found, "dense in int8")
    rounding = max(cases["one"]["rounding"])
    assert 1e-3 < rounding < 0.1
    assert max(cases["fsdp"]["errors"]) < 2 * rounding
    assert max(cases["fsdp"]["rounding"]) < 2 * rounding
    assert cases["fsdp"]["metrics"]["train/loss"] == pytest.approx(cases["one"]["metrics"]["train/loss"], rel=1e-3)
