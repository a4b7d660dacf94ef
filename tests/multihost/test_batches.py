"""The batches of a run are the same for 1, 2 and 4 processes, and each process reads only its rows."""

import json
from pathlib import Path

import pytest
from multihost.processes import DEVICES, finished

SCRIPT = Path(__file__).with_name("read_batches.py")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A mixture of two sources, shuffled, over 4 devices in a mesh of 2 x 2 or 4 x 1; caches are built once."""
    from conftest import TRAIN_FILES, VALIDATION_FILES, tiny_settings

    from lmtrain.data.config import DataConfig
    from lmtrain.preprocess.build import build_cache

    folder = tmp_path_factory.mktemp("multihost")
    settings = tiny_settings()
    settings["data"] = {
        "tokenizer": settings["data"]["tokenizer"],
        "cache_dir": str(folder / "cache"),
        "shuffle": True,
        "configs": {"large": {"train_urls": TRAIN_FILES}, "small": {"train_urls": VALIDATION_FILES}},
        "train_weights": [[0, {"large": 0.7, "small": 0.3}], [40, {"large": 0.2, "small": 0.8}]],
    }
    for source in DataConfig(**settings["data"]).sources().values():
        build_cache(source, "train")

    def write(model_axis_size):
        settings["trainer"] |= {"model_axis_size": model_axis_size, "train_batch_size": 8}
        path = folder / f"{model_axis_size}.json"
        path.write_text(json.dumps(settings))
        return path

    return write


def read(config, count, folder):
    """The rows that each of `count` processes holds."""
    return finished(SCRIPT, count, folder, config)


@pytest.mark.multi_device
@pytest.mark.parametrize("model_axis_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_global_batches_are_the_same_for_1_2_and_4_processes(config, model_axis_size, tmp_path):
    path = config(model_axis_size)
    (alone,) = read(path, 1, tmp_path)
    assert alone["rows"] == list(range(8))
    assert len(alone["held"]) == 100 * 3 * 8  # tokens, loss_mask and segments of every row
    assert len(set(alone["held"].values())) > 400  # rows differ, though epochs repeat the small corpus
    for count in (2, 4):
        parts = read(path, count, tmp_path)
        # each row is read by the processes whose devices hold it: two of 4 processes on a mesh of 2 x 2
        readers = max(1, model_axis_size * count // DEVICES)
        assert sorted(row for part in parts for row in part["rows"]) == sorted(list(range(8)) * readers)
        together = {place: value for part in parts for place, value in part["held"].items()}
        assert together == alone["held"]
