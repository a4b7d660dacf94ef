"""Exports during training: a wait for one export does not wait for later ones."""

import threading

import jax
import pytest
from conftest import TOKENIZER, tiny_settings
from flax import linen as nn

from lmtrain.hf.export import Origin
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.start import exporter as module

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
    layout = plan_layout(PartitioningConfig(), jax.devices())
    found = module.Exporter(config, Origin("one", "data"), model, tokenizer, layout, is_first=True)
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


def test_a_resumed_run_removes_partial_exports_and_keeps_complete_ones(exporter, tmp_path):
    for name in ("step-1", "step-2.tmp-77", "step-2.old-77", "notes.tmp-1"):
        (tmp_path / "run" / name).mkdir(parents=True)
    module._prepare(str(tmp_path / "run"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-1", "notes.tmp-1"}
    module._prepare("memory://exports")  # an object store has no partial exports
