"""TensorBoard event files, checked byte by byte and with TensorBoard's own reader."""

import itertools
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from lmtrain.tracking import tensorboard
from lmtrain.tracking.tensorboard import TensorboardTracker


def read_events(folder):
    """All events of the one file in `folder`. A TFRecord is length (8 bytes), crc (4), payload, crc (4)."""
    (path,) = folder.iterdir()
    data, at, events = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        events.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += length + 16
    assert at == len(data)
    return events


def values(events):
    return [(event.step, value) for event in events for value in event.summary.value]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tblogs" / "run ü"


def test_scalars_are_in_the_event_file_with_name_step_and_float32_value(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.log({"train/loss": 1.5, "throughput/tokens_per_second": 1e6}, 3)
    tracker.log({"train/loss": 0.1}, 4)
    tracker.finish()
    scalars = [(step, value.tag, value.simple_value) for step, value in values(read_events(folder))]
    assert scalars == [
        (3, "train/loss", 1.5),
        (3, "throughput/tokens_per_second", 1e6),
        (4, "train/loss", struct.unpack("f", struct.pack("f", 0.1))[0]),
    ]


def test_the_config_and_the_summary_are_logged_as_texts(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.hyperparameters({"model": {"type": "gpt2", "num_layers": 2}})
    tracker.summary({"parameters": 1234})
    tracker.finish()
    texts = {value.tag: value.tensor.string_val[0].decode() for _, value in values(read_events(folder))}
    assert texts == {
        "config/text_summary": "```yaml\nmodel:\n  type: gpt2\n  num_layers: 2\n```",
        "parameters/text_summary": "1234",
    }


def test_samples_are_texts_under_their_prompt_and_are_not_taken_for_markdown(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.text({"# Once": " upon\n* a"}, 4)
    tracker.finish()
    ((step, value),) = values(read_events(folder))
    assert (step, value.tag) == (4, "samples/# Once/text_summary")
    assert value.tensor.string_val[0].decode() == "    # Once upon\n    * a"


def purged_from(folder):
    return [event.step for event in read_events(folder) if event.session_log.status == SessionLog.START]


def test_after_a_restart_later_steps_are_purged(folder):
    tracker = TensorboardTracker(str(folder), 7)
    tracker.log({"train/loss": 1.0}, 8)
    tracker.finish()
    assert purged_from(folder) == [8]


def test_a_new_run_purges_nothing(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.log({"train/loss": 1.0}, 1)
    tracker.finish()
    assert purged_from(folder) == []


def as_tensorboard_reads(folder):
    """The scalars as {tag: [(step, value)]} and the texts as {tag: text}, of all event files of the folder."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={TENSORS: 0}).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    return scalars, texts


def test_tensorboard_itself_reads_scalars_and_texts(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.hyperparameters({"model": {"type": "gpt2"}})
    tracker.summary({"parameter_count": 1234})
    tracker.artifact("logs/run-1/profiler", "run-1-profile", "profile")
    for step in range(1, 4):
        tracker.log({"train/loss": step / 4, "throughput/mfu": 0.5}, step)
    tracker.finish()
    scalars, texts = as_tensorboard_reads(folder)
    assert scalars == {
        "train/loss": [(1, 0.25), (2, 0.5), (3, 0.75)],
        "throughput/mfu": [(1, 0.5), (2, 0.5), (3, 0.5)],
    }
    assert texts == {
        "config/text_summary": "```yaml\nmodel:\n  type: gpt2\n```",
        "parameter_count/text_summary": "1234",
        "profile/run-1-profile/text_summary": "logs/run-1/profiler",
    }


def test_tensorboard_itself_shows_each_step_once_after_a_kill_and_a_restart(folder, monkeypatch):
    """Up to step 5, then again from step 3: later steps of the first start are purged."""
    processes = itertools.count(1)
    monkeypatch.setattr(tensorboard.os, "getpid", lambda: next(processes))  # each start has its own process id
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
