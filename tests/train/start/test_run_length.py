"""The number of steps that the data allows, and the setting that it becomes."""

from types import SimpleNamespace

import pytest

from lmtrain.data.caches import Caches
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.train.start import checks as module
from lmtrain.train.start.checks import length_of_data

CONFIG = RunConfig(epoch=2, trainer={"num_train_steps": 100, "train_batch_size": 4})


@pytest.mark.parametrize(
    ("steps", "config", "source"),
    [
        (100, CONFIG, None),
        (30, CONFIG, "epoch 2 (30 steps)"),
        (1, CONFIG.model_copy(update={"epoch": 0}), "data.stop_strategy first_exhausted (1 step)"),
    ],
)
def test_a_run_that_its_data_ends_has_that_number_of_steps(monkeypatch, caplog, steps, config, source):
    asked = []
    monkeypatch.setattr(module, "check_batch", lambda data, caches, *sizes: asked.append(sizes))
    monkeypatch.setattr(module, "choose_steps", lambda data, caches, *sizes: asked.append(sizes) or steps)
    with caplog.at_level("INFO"):
        found = length_of_data(config, Caches({}, {}))
    sizes = config.model.seq_len, config.trainer.batch_sizes
    assert asked == [sizes, (*sizes, 100, config.epoch, config.trainer.seed)]
    assert found == (source and (source, {"trainer": {"num_train_steps": steps}}))
    assert bool(caplog.messages) == (source is not None)


def test_less_data_than_a_batch_is_refused(monkeypatch):
    monkeypatch.setattr(module, "check_batch", lambda *_: None)
    monkeypatch.setattr(module, "choose_steps", lambda *_: 0)
    with pytest.raises(UserError, match="the data is less than one batch; lower "):
        length_of_data(CONFIG, SimpleNamespace())
