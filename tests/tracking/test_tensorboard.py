"""TensorBoard: what was logged is in the event file, read here byte by byte."""

import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

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


def test_the_config_and_the_summary_are_texts(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.hyperparameters({"model": {"type": "gpt2", "num_layers": 2}})
    tracker.summary({"parameters": 1234})
    tracker.finish()
    texts = {value.tag: value.tensor.string_val[0].decode() for _, value in values(read_events(folder))}
    assert texts == {
        "config/text_summary": "```yaml\nmodel:\n  type: gpt2\n  num_layers: 2\n```",
        "parameters/text_summary": "1234",
    }


def purged_from(folder):
    return [event.step for event in read_events(folder) if event.session_log.status == SessionLog.START]


def test_after_a_restart_tensorboard_is_told_to_forget_later_steps(folder):
    tracker = TensorboardTracker(str(folder), 7)
    tracker.log({"train/loss": 1.0}, 8)
    tracker.finish()
    assert purged_from(folder) == [8]


def test_a_new_run_purges_nothing(folder):
    tracker = TensorboardTracker(str(folder), 0)
    tracker.log({"train/loss": 1.0}, 1)
    tracker.finish()
    assert purged_from(folder) == []
