"""A run without a model, for tests of the loop and its parts: what happens is recorded, and nothing is computed."""

import contextlib
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.checkpoint.config import decide, next_permanent_step
from lmtrain.evaluation.interface import Context
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import ALONE
from lmtrain.runtime.signals import StopRequest
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.tracking.goodput import Ledger, Timer
from lmtrain.train.loop import loop as loop_module
from lmtrain.train.loop.loop import train
from lmtrain.train.loop.saver import Decisions, Saver
from lmtrain.train.loop.setup import Setup, Start
from lmtrain.train.program.compile import ModelFlops
from lmtrain.train.start.reporting import Reporting
from lmtrain.train.step.norms import Watch
from lmtrain.train.step.state import TrainState

SEQ_LEN = 10


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeRun:
    """A run of `steps` steps. `events` are what happened, in order; `logged` the metrics, by step.

    `at` has functions that are called when an event of this name happens. Keywords are settings of the trainer.
    """

    def __init__(self, steps=4, processes=ALONE, **trainer):
        trainer = {"num_train_steps": steps, "train_batch_size": 2, "tracker": []} | trainer
        trainer.setdefault("watch", {"watch_targets": []})
        trainer.setdefault("checkpointer", {"keep": [], "save_interval": None})
        self.config = RunConfig(model={"type": "gpt2", "seq_len": SEQ_LEN}, trainer=trainer)
        self.processes = processes
        self.events: list[str] = []
        self.at: dict[str, object] = {}
        self.logged: dict[int, dict[str, float]] = {}
        self.losses: dict[int, float] = {}
        self.seconds = 1.0  # of a step
        self.batch_sizes = self.config.trainer.batch_sizes
        self.stop = StopRequest()
        self.clock = Clock()
        self.timer = Timer(self.clock)
        self.decisions = Decisions(self.config.trainer.checkpointer.keep_best, self.config.trainer.early_stopping)
        self.evaluators: list[FakeEvaluator] = []
        self.exporter = None
        self.checkpointer = FakeCheckpointer(self)

    def happens(self, event: str) -> None:
        self.events.append(event)
        self.clock.now += 0.01
        if event in self.at:
            self.at[event]()

    @property
    def program(self):
        return SimpleNamespace(
            config=self.config,
            layout=build_layout(PartitioningConfig()),
            train_step=FakeStep(self),
            watch=Watch(self.config.trainer.watch, {}),
            explaining_errors=contextlib.nullcontext,
        )

    @property
    def saver(self) -> Saver:
        return Saver(self.checkpointer, self.exporter, {"run": "info"}, self.decisions, FakeTrackers(self), self.timer)

    def reporting(self, folder="") -> Reporting:
        return Reporting(
            run="one",
            folder=folder,
            facts={},
            trackers=FakeTrackers(self),
            saves_xla_dumps=False,
            timer=self.timer,
            ledger=Ledger(None, self.timer, wall=self.clock),
            flops=ModelFlops(1e6, 1e6, 1e9),
        )

    def batches(self, first_step):
        for step in range(first_step, self.config.trainer.num_train_steps):
            yield {"tokens": np.zeros((self.batch_sizes.at(step), SEQ_LEN), np.int32)}

    def setup(self, first_step=0, evaluation_pending=False, batches=None, folder="") -> Setup:
        state = TrainState(first_step, params="params", opt_state="moments")
        return Setup(
            program=self.program,
            start=Start(state, first_step, evaluation_pending),
            batches=self.batches(first_step) if batches is None else batches,
            evaluation=Context(
                model=None,
                layout=None,
                compute_dtype="float32",
                tokenizer=None,
                sets={},
                seq_len=SEQ_LEN,
                processes=self.processes,
            ),
            saver=self.saver,
            reporting=self.reporting(folder),
        )

    def train(self, **setup) -> bool:
        return train(self.setup(**setup), self.stop)


class FakeStep:
    """A step whose loss is `losses[step]`, else its number."""

    def __init__(self, run: FakeRun):
        self._run = run

    def lower(self, state, batch, requests):
        self._run.happens(f"compile {len(batch['tokens'])}")
        return SimpleNamespace(compile=lambda: None)

    def __call__(self, state, batch, requests):
        run, step = self._run, state.step + 1
        run.happens(f"step {step}")
        run.clock.now += run.seconds
        metrics = {"train/loss": jnp.float32(run.losses.get(step, step)), "train/learning_rate": jnp.float32(0.5)}
        return state.replace(step=step), metrics, None if requests is None else np.max(requests, axis=0)


class FakeTrackers:
    def __init__(self, run: FakeRun):
        self._run = run
        self.losses = []

    def log(self, metrics, step):
        self._run.logged.setdefault(step, {}).update(metrics)
        self._run.happens("log " + (f"loss {step}" if "train/loss" in metrics else f"{min(metrics)} {step}"))

    def text(self, texts, step):
        self._run.happens(f"text {step}")

    def artifact(self, path, name, kind):
        self._run.happens(f"artifact {kind}")

    def sync(self):
        self._run.happens("sync")

    def finish(self):
        self._run.happens("finish")


class FakeEvaluator:
    """Evaluates every `every` steps; its losses are `values`, the last one repeated."""

    name = ""
    optional = False

    def __init__(self, run: FakeRun, every, values=(1.0,)):
        self.every = every
        self._run = run
        self._values = iter(values)
        self._value = math.nan

    def prepare(self, context):
        self._context = context
        return True

    def evaluate(self, params, step):
        self._run.happens(f"evaluate {step}")
        self._context.check_stop()
        self._value = next(self._values, self._value)
        return {"loss": self._value}

    def describe(self, metrics):
        return "evaluated"


class FakeCheckpointer:
    """Saves in no time. `is_due` and `seconds_to_next` are set by the test."""

    def __init__(self, run: FakeRun):
        self._run = run
        self.is_due = False
        self.seconds_to_next = None
        self.saved = {}

    def kind_at(self, step, *, last, asked):
        return decide(step, self._run.config.trainer.checkpointer.keep, last=last, asked=asked)

    def next_permanent(self, step, last):
        return next_permanent_step(step, self._run.config.trainer.checkpointer.keep, last)

    def save(self, step, kind, parts, run_info, before_commit, best_step, how="save"):
        self.is_due = False
        self.saved[step] = {**run_info, "parts": parts, "best_step": best_step}
        self._run.happens(f"{how} {step} {kind.value}")
        before_commit()
        return 0.25

    def save_now(self, *arguments, **more):
        return self.save(*arguments, **more, how="save_now")

    def take_saved(self):
        return []

    def close(self):
        self._run.happens("close")


class FakeExporter:
    def __init__(self, run: FakeRun, every=2, missed=()):
        self._run = run
        self._every = every
        self._missed = missed
        self.failed = []

    def was_missed(self, step):
        return step in self._missed

    def due(self, step, last):
        return last or step % self._every == 0

    def export(self, step, params):
        self._run.happens(f"export {step}")

    def under_way(self):
        return lambda: self._run.happens("exported")

    def finish(self):
        self._run.happens("exports finished")


@pytest.fixture
def fake_run(monkeypatch):
    """`fake_run(steps, evaluate_every, export_every, **trainer)`."""
    runs = []

    def make(steps=4, evaluate_every=None, values=(1.0,), export_every=None, missed=(), **settings) -> FakeRun:
        run = FakeRun(steps, **settings)
        if evaluate_every is not None:
            run.evaluators = [FakeEvaluator(run, evaluate_every, values)]
        if export_every is not None:
            run.exporter = FakeExporter(run, export_every, missed)
        runs.append(run)
        return run

    monkeypatch.setattr(loop_module, "build_evaluators", lambda *_: runs[-1].evaluators)
    return make
