"""Exports during training: a wait for one export does not wait for later ones."""

import os
import threading

import jax
import pytest
from conftest import TOKENIZER, tiny_settings
from flax import linen as nn

from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import ALONE
from lmtrain.runtime.storage import list_names, write_bytes
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.start import exporter as module
from lmtrain.weights.export_folder import ModelOrigin

SECONDS = 30


class HeldWriting:
    """A replacement of `write_export` that blocks until an export is released."""

    def __init__(self) -> None:
        self.released = {name: threading.Event() for name in ("step-1", "step-2")}

    def __call__(self, output: str, *_: object) -> None:
        assert self.released[output.rpartition("/")[2]].wait(SECONDS)


@pytest.fixture
def writing(monkeypatch):
    held = HeldWriting()
    monkeypatch.setattr(module, "write_export", held)
    yield held
    for event in held.released.values():
        event.set()


@pytest.fixture
def exporter(tmp_path):
    config = RunConfig(**tiny_settings(), hf_save_path=str(tmp_path))
    tokenizer = load_tokenizer(str(TOKENIZER))
    model = build_model(config.model, tokenizer.vocab_size)
    layout = build_layout(PartitioningConfig(), jax.devices())
    found = module.Exporter(config, ModelOrigin("one", "data"), model, tokenizer, layout, ALONE)
    found.params = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape), nn.unbox(abstract_params(model)))
    yield found
    found.finish()


def test_waiting_for_an_export_does_not_wait_for_the_next(exporter, writing):
    """A save waits in the background for the export before it, while the next one starts in the foreground."""
    exporter.under_way()()  # there is none
    exporter.export(1, exporter.params)
    wait = exporter.under_way()
    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    writing.released["step-1"].set()
    waiting.join(SECONDS)
    exporter.export(2, exporter.params)
    wait()
    assert not exporter.failed


def test_a_resumed_run_exports_a_step_that_was_due_and_is_missing(exporter, tmp_path):
    exporter._every, exporter._last_step = 4, 6
    assert [step for step in range(8) if exporter.was_missed(step)] == [4, 6, 7]  # 7: a run that was made shorter
    (tmp_path / "one" / "step-4").mkdir(parents=True)
    assert exporter.was_missed(4)  # a folder that a kill left
    (tmp_path / "one" / "step-4" / "config.json").write_text("{}")
    assert not exporter.was_missed(4)


def test_an_interrupted_export_is_missed_and_one_of_adapters_is_not(exporter, tmp_path):
    exporter._every = 4
    (tmp_path / "one" / "step-4").mkdir(parents=True)
    (tmp_path / "one" / "step-4" / "adapter_config.json").write_text("{}")
    assert not exporter.was_missed(4)
    (tmp_path / "one" / "step-4.old-7").mkdir()  # the process was killed while it deleted the earlier export
    assert exporter.was_missed(4)
    (tmp_path / "one" / "step-4.old-7" / "photo.png").write_text("precious")
    assert not exporter.was_missed(4)


@pytest.mark.parametrize("place", ["folder", "URL"])
def test_a_resumed_run_removes_partial_exports_and_keeps_complete_ones(exporter, tmp_path, place):
    folder = str(tmp_path / "run") if place == "folder" else "memory://partial/run"
    for name in ("step-1", "step-2.tmp-77", "step-2.old-77", "notes.tmp-1"):
        if place == "folder":
            os.makedirs(f"{folder}/{name}")
        write_bytes(f"{folder}/{name}/model.safetensors", b"")
    module._prepare(folder)
    assert list_names(folder) == ["notes.tmp-1", "step-1"]
