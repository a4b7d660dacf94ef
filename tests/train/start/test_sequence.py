"""Steps 4 to 6 of a start (see `lmtrain/commands/train.py`): their results, and what is refused before a save."""

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.discovery import find_checkpoints
from lmtrain.checkpoint.policies import Kind
from lmtrain.config.errors import UserError
from lmtrain.evaluation.interface import Context
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess.build import Build
from lmtrain.preprocess.executor import choose_executor
from lmtrain.preprocess.prepare import plan_caches
from lmtrain.run.config import RunConfig
from lmtrain.runtime.config import RayConfig
from lmtrain.runtime.processes import ALONE
from lmtrain.tracking.json_log import JsonLog
from lmtrain.tracking.open import Trackers
from lmtrain.train.program.program import plan_program
from lmtrain.train.start.evaluation import is_pending, open_evaluation
from lmtrain.train.start.facts import describe_run
from lmtrain.train.start.initial_state import begin, own_checkpoint
from lmtrain.train.start.resume import EVALUATION_PENDING
from lmtrain.train.start.train_batches import TrainBatches
from lmtrain.train.step.state import TrainState


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    """Built by the first run that needs it."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def config(settings, tmp_path, monkeypatch, shared_cache):
    """`config(model={"seq_len": 8})`: a tiny run in the test's folder, with changed sections."""
    monkeypatch.chdir(tmp_path)
    settings["data"] |= {"num_preprocess_workers": 1, "cache_dir": shared_cache}
    settings["trainer"] |= {"jax_compilation_cache_dir": None, "tracker": {"type": "noop"}}
    settings["model"] |= {"num_layers": 1, "gradient_checkpointing": False}

    def make(**sections) -> RunConfig:
        return RunConfig(**{name: part | sections.get(name, {}) for name, part in settings.items()})

    return make


class Started(NamedTuple):
    """A run before its first step."""

    checkpointer: Checkpointer
    run_info: dict[str, Any]
    state: TrainState
    first_step: int
    batches: Iterator[Any]
    evaluation: Context
    evaluation_pending: bool


@pytest.fixture
def start():
    """`start(config)` starts a run like `lmtrain train`; all are closed at the end."""
    opened = []

    def begin_run(config: RunConfig) -> Started:
        opened.append(Checkpointer("checkpoints/run", config.trainer.checkpointer))
        return start_run(config, opened[-1])

    yield begin_run
    for checkpointer in opened:
        checkpointer.close()


def start_run(config: RunConfig, checkpointer: Checkpointer) -> Started:
    plans = plan_caches(config.data)
    for plan in plans.all:
        if plan.manifest is None:
            build = Build([plan], choose_executor(RayConfig(), 1, ALONE)).start()
            while build.running:
                time.sleep(0.02)
            build.check()
    caches = plans.caches
    own = own_checkpoint(config, checkpointer)
    tokenizer = load_tokenizer(config.data.tokenizer)
    program = plan_program(config, tokenizer.vocab_size)
    batches = TrainBatches(config, caches, program.layout)
    run_info = describe_run(config, "run", tokenizer.identity, caches, program)
    state, first_step = begin(program, own, run_info, None)
    evaluation = open_evaluation(program, caches, tokenizer, "logs/run")
    pending = is_pending(own, Trackers())
    return Started(checkpointer, run_info, state, first_step, batches.after(first_step), evaluation, pending)


def test_a_fresh_run_starts_at_the_beginning_of_the_data_with_the_sizes_of_its_config(config, start):
    run = start(config())
    assert run.first_step == int(run.state.step) == 0
    batch = next(run.batches)
    assert batch["tokens"].shape == batch["loss_mask"].shape == (4, 32)
    validation = run.evaluation.sets[""]
    assert len(validation) == len(list(validation)) == 2
    assert len(list(validation)) == 2  # each evaluation reads them from the beginning
    assert not run.evaluation_pending
    assert run.run_info["identity"]["seed"] == 0
    assert run.run_info["machine"]["mesh"] == {"replica": 1, "data": jax.device_count(), "model": 1}
    json.dumps(run.run_info)
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
def test_settings_that_do_not_fit_are_refused(config, start, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        start(config(**changes))


def save_and_close(run, step: int) -> None:
    run.checkpointer.save(step, Kind.PERMANENT, run.state.parts, run.run_info)
    run.checkpointer.close()


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


def test_a_run_resumes_from_its_checkpoint_even_with_another_learning_rate(config, start):
    run = start(config())
    batches = [next(run.batches) for _ in range(4)]
    run.checkpointer.save(3, Kind.PERMANENT, run.state.parts, run.run_info)
    run.checkpointer.close()
    later = start(config(optimizer={"learning_rate": 0.5}))
    assert later.first_step == int(later.state.step) == 3
    assert (next(later.batches)["tokens"] == batches[3]["tokens"]).all()


@pytest.mark.parametrize(("logged", "expected"), [("train/loss", True), ("eval/accuracy/top1", False)])
def test_an_interrupted_evaluation_is_repeated_unless_its_metrics_are_logged(config, start, tmp_path, logged, expected):
    """A run killed between logging these metrics and its next checkpoint has already evaluated the step."""
    run = start(config())
    run.checkpointer.save(4, Kind.PERMANENT, run.state.parts, run.run_info | {EVALUATION_PENDING: True})
    run.checkpointer.close()
    log = tmp_path / "run.metrics.jsonl"
    log.write_text(json.dumps({"step": 4, logged: 1.0}) + "\n")
    trackers = Trackers(JsonLog(str(log), 4))
    assert is_pending(find_checkpoints("checkpoints/run")[-1], trackers) == expected
    trackers.finish()
