"""TensorBoard event files, read by TensorBoard itself."""

import itertools

import pytest

from lmtrain.tracking import open
from lmtrain.tracking.open import TensorboardTracker


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tblogs" / "run ü"


def as_tensorboard_reads(folder):
    """The scalars as {tag: [(step, value)]} and the texts as {tag: text}, of all event files of the folder."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={TENSORS: 0}).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    return scalars, texts


def test_scalars_and_texts(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.hyperparameters({"model": {"type": "gpt2", "num_layers": 2}})
    tracker.summary({"parameter_count": 1234})
    tracker.artifact("logs/run-1/profiler", "run-1-profile", "profile")
    for step in range(1, 4):
        tracker.log({"train/loss": step / 4, "throughput/tokens_per_second": 1e6}, step)
    tracker.text({"# Once": " upon\n* a"}, 3)  # is not taken for Markdown
    tracker.finish()
    scalars, texts = as_tensorboard_reads(folder)
    assert scalars == {
        "train/loss": [(1, 0.25), (2, 0.5), (3, 0.75)],
        "throughput/tokens_per_second": [(1, 1e6), (2, 1e6), (3, 1e6)],
    }
    assert texts == {
        "config/text_summary": "```yaml\nmodel:\n  type: gpt2\n  num_layers: 2\n```",
        "parameter_count/text_summary": "1234",
        "profile/run-1-profile/text_summary": "logs/run-1/profiler",
        "samples/# Once/text_summary": "    # Once upon\n    * a",
    }


def test_each_step_is_shown_once_after_a_kill_and_a_restart(folder, monkeypatch):
    """Up to step 5, then again from step 3: later steps of the first start are purged."""
    processes = itertools.count(1)
    monkeypatch.setattr(open.os, "getpid", lambda: next(processes))  # each start has its own process id
    killed = TensorboardTracker(str(folder), 0)
    for step in range(1, 6):
        killed.log({"train/loss": float(step)}, step)
    killed.finish()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-5])  # killed in the middle of a record
    restarted = TensorboardTracker(str(folder), 3)
    for step in range(4, 7):
        restarted.log({"train/loss": 10.0 * step}, step)
    restarted.finish()
    scalars, _ = as_tensorboard_reads(folder)
    assert scalars == {"train/loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]}


def test_a_kill_loses_seconds_of_metrics_not_minutes(folder):
    """Unflushed metrics before a checkpoint are not logged again; tensorboardX flushes every two minutes by default."""
    tracker = TensorboardTracker(str(folder), 0)
    assert tracker._writer.file_writer.event_writer._flush_secs <= 10
    tracker.finish()
