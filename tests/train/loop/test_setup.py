"""A run is put together: its state, its batches, its files, and what it refuses; a resumed one continues."""

import os
import time

import numpy as np
import pytest
from opened_run import open_run

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import Kind
from lmtrain.config.load import LoadedConfig
from lmtrain.run.run import Run
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE
from lmtrain.train.loop import setup as module
from lmtrain.train.loop.setup import set_up
from lmtrain.train.program.out_of_memory import MemoryUse


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`start(save=step)`: the set-up of a tiny run, which then saves a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def make(save=None, **settings):
        config, caches, tokenizer = open_run(trainer={"tracker": []}, **settings)
        run = Run(LoadedConfig(config, path="one.yaml"), "one")
        checkpointer = Checkpointer(run.checkpoints, config.trainer.checkpointer)
        own = checkpointer.newest()
        setup = set_up(run, config, caches, tokenizer, checkpointer, own, ALONE, time.time())
        if save is not None:
            state = setup.start.state.replace(step=np.int32(save))
            setup.saver.save(state, save, Kind.PERMANENT, at_once=True, evaluated=False)
        checkpointer.close()
        setup.reporting.trackers.finish()
        return setup

    return make


def test_a_new_run_starts_at_step_0_and_a_resumed_one_where_it_was_saved(start):
    new = start(save=3)
    assert (new.start.step, new.start.evaluation_pending) == (0, False)
    assert sorted(os.listdir("logs/one")) == ["config.yaml", "goodput.json"]
    assert new.saver.exporter is None
    resumed = start()
    assert (resumed.start.step, int(resumed.start.state.step)) == (3, 3)
    assert resumed.start.evaluation_pending
    fourth = [batch for batch, _ in zip(new.batches, range(4), strict=False)][-1]
    np.testing.assert_array_equal(next(resumed.batches)["tokens"], fourth["tokens"])


def test_a_run_that_saves_exports_has_an_exporter(start):
    assert start(hf_save_path="exports").saver.exporter.due(12, last=True)


def test_a_state_that_does_not_fit_is_refused_before_it_exists(start, monkeypatch):
    def refuse(self):
        raise UserError("the training state is too large")

    monkeypatch.setattr(MemoryUse, "check_fits", refuse)
    monkeypatch.setattr(module, "begin", lambda *_: pytest.fail("the state was computed"))
    with pytest.raises(UserError, match="too large"):
        start()
    assert not os.path.exists("logs/one/config.yaml")
