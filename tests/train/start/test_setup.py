"""Setting a run up: what is already finished, what is put together, and what is refused before anything is saved."""

import json
import os
import re
import time

import jax
import pytest

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.policies import Kind
from lmtrain.commands.caches import plan_caches
from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess.build import Build
from lmtrain.preprocess.executor import choose_executor
from lmtrain.run.config import RunConfig
from lmtrain.runtime.config import RayConfig
from lmtrain.runtime.processes import ALONE
from lmtrain.train.start.initial_state import own_checkpoint
from lmtrain.train.start.setup import set_up

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def config(settings, tmp_path, monkeypatch):
    """`config(seq_len=8)(...)`: a tiny run in the test's folder; sections are changed by name."""
    monkeypatch.chdir(tmp_path)
    settings["data"] |= {"num_preprocess_workers": 1}
    settings["trainer"] |= {"jax_compilation_cache_dir": None, "tracker": {"type": "noop"}}
    settings["model"] |= {"num_layers": 1, "gradient_checkpointing": False}

    def make(**sections) -> RunConfig:
        return RunConfig(**{name: part | sections.get(name, {}) for name, part in settings.items()})

    return make


@pytest.fixture
def start():
    """`start(config)` sets the run up as `lmtrain train` does; all are closed in the end."""
    opened = []

    def begin(config: RunConfig):
        opened.append(set_up_run(config))
        return opened[-1]

    yield begin
    for setup in opened:
        setup.checkpointer.close()
        setup.trackers.finish()


def set_up_run(config: RunConfig):
    plans = plan_caches(config.data)
    for plan in plans.all:
        if plan.manifest is None:
            build = Build([plan], choose_executor(RayConfig(), 1, ALONE)).start()
            while build.running:
                time.sleep(0.02)
            build.check()
    caches = plans.caches
    tokenizer = load_tokenizer(config.data.tokenizer)
    checkpointer = Checkpointer("checkpoints/run", config.trainer.checkpointer)
    try:
        return set_up(config, "run", tokenizer, caches, checkpointer, own_checkpoint(config, checkpointer))
    except BaseException:
        checkpointer.close()
        raise


def test_a_fresh_run_starts_at_the_beginning_of_the_data_with_the_sizes_of_its_config(config, start):
    setup = start(config())
    assert setup.first_step == int(setup.state.step) == 0
    assert (setup.batch_sizes.all, setup.seq_len) == ([4], 32)
    batch = next(setup.train_batches)
    assert batch["tokens"].shape == batch["loss_mask"].shape == (4, 32)
    validation = setup.evaluation.sets[""]
    assert len(validation) == len(list(validation)) == 2
    assert len(list(validation)) == 2  # each evaluation reads them from the beginning
    assert not setup.evaluation_pending
    assert setup.run_info["identity"]["seed"] == 0
    assert setup.run_info["machine"]["mesh"] == {"replica": 1, "data": jax.device_count(), "model": 1}
    json.dumps(setup.run_info)
    assert sorted(os.listdir("checkpoints/run")) == ["attempt.json", "lock"]


def test_without_validation_files_there_is_nothing_to_evaluate(config, start):
    assert start(config(data={"validation_urls": None})).evaluation.sets == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"model_axis_size": 3}}, "trainer.model_axis_size: 1 devices do not divide by 3"),
        ({"model": {"seq_len": 1_000_000}}, "tokens are less than one sequence of 1,000,000"),
    ],
)
def test_what_does_not_fit_is_refused(config, start, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        start(config(**changes))


def save_and_close(setup, step: int) -> None:
    setup.checkpointer.save(step, Kind.PERMANENT, setup.state.parts, setup.run_info)
    setup.checkpointer.close()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"trainer": {"seed": 5}}, "seed: the checkpoint has 0, this config has 5"),
        ({"trainer": {"train_batch_size": 8}}, "train_batch_size: the checkpoint has 4, this config has 8"),
        ({"model": {"num_layers": 2}}, "model.num_layers: the checkpoint has 1, this config has 2"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(config, start, changes, line):
    save_and_close(start(config()), 4)
    with pytest.raises(UserError, match=re.escape(line)):
        start(config(**changes))


def test_a_run_goes_on_after_its_checkpoint_even_with_another_learning_rate(config, start):
    setup = start(config())
    batches = [next(setup.train_batches) for _ in range(4)]
    setup.checkpointer.save(3, Kind.PERMANENT, setup.state.parts, setup.run_info)
    setup.checkpointer.close()
    later = start(config(optimizer={"learning_rate": 0.5}))
    assert later.first_step == int(later.state.step) == 3
    assert (next(later.train_batches)["tokens"] == batches[3]["tokens"]).all()
