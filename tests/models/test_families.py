"""The test families on meshes: patterns of layers, experts and auxiliary losses give the same on 1 and on 8 devices."""

import functools
import json
from pathlib import Path

import pytest
from forked import fake_devices, run_script

pytestmark = pytest.mark.multi_device
SCRIPT = Path(__file__).with_name("steps_on_meshes.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """`found(part)`: model -> mesh -> metrics and errors. Each part is run once."""

    @functools.cache
    def run(part):
        folder = tmp_path_factory.mktemp("families")
        output = folder / "found.json"
        run_script(SCRIPT.read_text(), output, part, folder=folder, seconds=500, XLA_FLAGS=fake_devices(8))
        cases = {}
        for name, case in json.loads(output.read_text()).items():
            model, mesh = name.split(", ")
            cases.setdefault(model, {})[mesh] = case
        return cases

    return run


HYBRIDS = ("hybrid", "hybrid over positions", "hybrid with mosaic", "hybrid over positions with triton")
METRICS = {
    "window": "train/loss",
    "auxiliary": "train/routed",
    "mixer": "train/loss",
    "outputs": "train/second_loss",
    "hybrid": "train/loss",
    "mixed": "moe/balance_loss/layers",
    "latent": "train/mtp_2_loss",
}
MORE_METRICS = METRICS | {"biased": "moe/balance_loss/layers"}


@pytest.mark.parametrize(
    ("part", "model", "metric"),
    [
        *(("suite", *case) for case in METRICS.items()),
        *(
            pytest.param("more", model, MORE_METRICS[model.partition(" ")[0]], marks=pytest.mark.long)
            for model in (*HYBRIDS, "mixed", "biased", "latent")
        ),
        *(
            pytest.param("release", model, METRICS[model.split()[0]], marks=[pytest.mark.long, pytest.mark.release])
            for model in ("window", "auxiliary", "mixer", "outputs", "hybrid with triton")
        ),
    ],
)
def test_metrics_and_gradients_equal_those_of_one_device(found, part, model, metric):
    cases = found(part)[model]
    assert len(cases) >= 2
    expected = cases["one"]["metrics"]
    assert metric in expected
    for name, case in cases.items():
        for metric, value in expected.items():  # some have a value for each layer
            assert case["metrics"][metric] == pytest.approx(value, rel=1e-5), (name, metric)
        assert max(case["errors"]) < 1e-5, name


@pytest.mark.long
def test_products_in_8_bits_round_the_same_on_every_mesh(found):
    """Scales of fp8 are powers of two: that each device has its own changes only numbers far below the largest. On one
    device: test_quantization.py."""
    models = found("more")
    for cases in (models["dense in fp8"], models["mixed in fp8"]):
        loss = cases["one"]["metrics"]["train/loss"]
        for name, case in cases.items():
            assert case["metrics"]["train/loss"] == pytest.approx(loss, rel=1e-5), name
            assert max(case["errors"]) < 1e-3 < max(case["rounding"]), name
    one, other = (models["dense in int8"][name] for name in ("one", "fsdp"))  # integers differ by their rounding
    rounding = max(one["rounding"])
    assert 1e-3 < rounding < 0.1
    assert max(*other["errors"], *other["rounding"]) < 2 * rounding
    assert other["metrics"]["train/loss"] == pytest.approx(one["metrics"]["train/loss"], rel=1e-3)
