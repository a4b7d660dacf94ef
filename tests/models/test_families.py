"""The test families on meshes: patterns of layers, experts and auxiliary losses give the same on 1 and on 8 devices."""

import json
from pathlib import Path

import pytest
from forked import fake_devices, run_script

pytestmark = pytest.mark.multi_device
SCRIPT = Path(__file__).with_name("steps_on_meshes.py")


@pytest.fixture(scope="module", params=["suite", pytest.param("all", marks=pytest.mark.long)])
def found(request, tmp_path_factory):
    """Model -> mesh -> metrics and errors."""
    folder = tmp_path_factory.mktemp("families")
    output = folder / "found.json"
    run_script(SCRIPT.read_text(), output, request.param, folder=folder, seconds=500, XLA_FLAGS=fake_devices(8))
    cases = {}
    for name, case in json.loads(output.read_text()).items():
        model, mesh = name.split(", ")
        cases.setdefault(model, {})[mesh] = case
    return cases | {"all": request.param == "all"}


@pytest.mark.parametrize(("model", "metric"), [("window", "loss"), ("auxiliary", "routed"), ("mixed", "loss")])
def test_metrics_and_gradients_equal_those_of_one_device(found, model, metric):
    cases = found[model]
    assert len(cases) == (3 if found["all"] else 2)
    expected = cases["one"]["metrics"]
    assert f"train/{metric}" in expected
    for name, case in cases.items():
        assert case["metrics"] == pytest.approx(expected, rel=1e-5), name
        assert max(case["errors"]) < 1e-5, name


def test_products_in_8_bits_round_the_same_on_every_mesh(found):
    """Scales of fp8 are powers of two: that each device has its own changes only numbers far below the largest."""
    for cases in (found[name] for name in ("dense in fp8", "mixed in fp8") if name in found):
        assert len(cases) >= 2
        for name, case in cases.items():
            loss = cases["one"]["metrics"]["train/loss"]
            assert case["metrics"]["train/loss"] == pytest.approx(loss, rel=1e-5), name
            assert max(case["errors"]) < 1e-3 < max(case["rounding"]), name
    if found["all"]:  # integers differ by their rounding
        cases = found["dense in int8"]
        rounding = max(cases["one"]["rounding"])
        assert 1e-3 < rounding < 0.1
        assert max(cases["fsdp"]["errors"]) < 2 * rounding
        assert max(cases["fsdp"]["rounding"]) < 2 * rounding
        assert cases["fsdp"]["metrics"]["train/loss"] == pytest.approx(cases["one"]["metrics"]["train/loss"], rel=1e-3)
