"""The batches of a run are the same for 1, 2 and 4 processes, and each process reads only its part."""

import json
from pathlib import Path

import pytest
from cache_building import build_cache
from conftest import TRAIN_FILES, VALIDATION_FILES
from multihost.processes import DEVICES, run_processes

from lmtrain.data.config import DataConfig

SCRIPT = Path(__file__).with_name("read_batches.py")


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("axis", "size"), [*(pytest.param("model", size, marks=pytest.mark.long) for size in (1, 2)), ("context", 4)]
)
def test_global_batches_are_the_same_for_1_2_and_4_processes(settings, axis, size, tmp_path):
    """A mixture of two sources, shuffled, over 4 devices: in a mesh of 4 x 1 or 2 x 2, or each with a quarter of every
    sequence."""
    settings["trainer"] |= {f"{axis}_axis_size": size, "train_batch_size": 8}
    settings["data"] = {
        "tokenizer": settings["data"]["tokenizer"],
        "cache_dir": str(tmp_path / "cache"),
        "shuffle": True,
        "configs": {"large": {"train_urls": TRAIN_FILES}, "small": {"train_urls": VALIDATION_FILES}},
        "train_weights": [[0, {"large": 0.7, "small": 0.3}], [40, {"large": 0.2, "small": 0.8}]],
    }
    for source in DataConfig(**settings["data"]).sources().values():
        build_cache(source, "train")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    (alone,) = run_processes(SCRIPT, 1, tmp_path, config)
    assert alone["rows"] == list(range(8))
    parts = size if axis == "context" else 1
    assert len(alone["held"]) == 100 * 3 * 8 * parts  # tokens, loss_mask and segments of every row
    assert len(set(alone["held"].values())) > 400  # rows differ, though epochs repeat the small corpus
    length = settings["model"]["seq_len"]
    assert alone["columns"] == [0, length]
    for count in (2, 4):
        found = run_processes(SCRIPT, count, tmp_path, config)
        # each row is read by the processes whose devices hold it: two of 4 processes on a mesh of 2 x 2
        readers = max(1, size * count // DEVICES)
        assert sorted(row for part in found for row in part["rows"]) == sorted(list(range(8)) * readers)
        columns = [[number * length // count, (number + 1) * length // count] for number in range(count)]
        assert sorted(part["columns"] for part in found) == (columns if parts > 1 else [[0, length]] * count)
        together = {place: value for part in found for place, value in part["held"].items()}
        assert together == alone["held"]
