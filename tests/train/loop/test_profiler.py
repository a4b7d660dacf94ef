"""Profiler traces of some steps of a run, written by JAX."""

import glob
import gzip
import json
import os

import jax
import jax.numpy as jnp
import pytest

from lmtrain.run.trainer import LoggingConfig, ProfilerConfig
from lmtrain.train.loop.loop import Profiler


@jax.jit
def tiny(x):
    return jnp.tanh(x @ x)


def steps(profiler: Profiler, number: int) -> list[int]:
    """Run steps; returns those after which the trace was complete and was closed."""
    ended = []
    for step in range(1, number + 1):
        profiler.step_begins()
        with jax.profiler.TraceAnnotation(f"step {step} of the test"):
            result = tiny(jnp.ones((8, 8)))
        if profiler.is_last_step:
            jax.block_until_ready(result)
            assert profiler.close()
            ended.append(step)
    return ended


def events(folder) -> list[dict]:
    (path,) = glob.glob(f"{folder}/plugins/profile/*/perfetto_trace.json.gz")
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def traced_steps(folder) -> set[int]:
    names = (event.get("name", "") for event in events(folder))
    return {int(name.split()[1]) for name in names if name.endswith("of the test")}


@pytest.fixture
def recorded(monkeypatch):
    """Calls of JAX's profiler, which is replaced and traces nothing."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def test_a_trace_has_the_selected_steps_for_xprof_and_for_perfetto(tmp_path, caplog):
    folder = str(tmp_path / "logs" / "one" / "profiler")
    profiler = Profiler(ProfilerConfig(start_step=2, num_steps=2), folder)
    with caplog.at_level("INFO"):
        assert steps(profiler, 6) == [4]
    assert not profiler.close()
    (written,) = glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")
    assert os.path.getsize(written) > 1000
    assert traced_steps(folder) == {3, 4}
    assert any("tiny" in event.get("name", "") for event in events(folder))
    messages = [record.message for record in caplog.records]
    assert messages[0] == f"profiling 2 steps into {folder}"
    assert messages[-1].startswith(f"profile: {folder}; open it with `tensorboard --logdir {folder}`")


@pytest.mark.parametrize(
    ("start", "number", "ends"), [(1, 1, [2]), (1, 4, [5]), (7, 2, [9]), (9, 1, [10]), (9, 2, []), (10, 1, [])]
)
def test_steps_are_counted_from_this_start_of_the_run(recorded, tmp_path, start, number, ends):
    assert steps(Profiler(ProfilerConfig(start_step=start, num_steps=number), str(tmp_path)), 10) == ends
    assert recorded == ["start", "stop"][: (start < 10) + len(ends)]


def test_without_a_config_nothing_is_done(recorded, tmp_path):
    profiler = Profiler(None, str(tmp_path / "profiler"))
    assert steps(profiler, 200) == []
    assert not profiler.close()
    assert recorded == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("profiler", "expected"),
    [
        (False, None),
        (True, ProfilerConfig()),
        ({"start_step": 3, "num_steps": 4}, ProfilerConfig(start_step=3, num_steps=4)),
    ],
)
def test_true_is_the_default_profile(profiler, expected):
    assert LoggingConfig(profiler=profiler).profile == expected


def test_a_folder_that_cannot_be_created_is_logged_once_and_training_continues(recorded, tmp_path, caplog):
    (tmp_path / "in the way").write_text("")
    folder = str(tmp_path / "in the way" / "profiler")
    profiler = Profiler(ProfilerConfig(start_step=1, num_steps=2), folder)
    assert steps(profiler, 5) == []
    assert not profiler.close()
    assert recorded == []
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"profiler: cannot write a trace to {folder}: ")
    assert message.endswith("; training continues without it")


def test_a_trace_that_cannot_be_written_is_logged_and_training_continues(recorded, monkeypatch, tmp_path, caplog):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    profiler = Profiler(ProfilerConfig(start_step=1, num_steps=1), str(tmp_path))
    for _ in range(2):
        profiler.step_begins()
    assert profiler.is_last_step
    assert not profiler.close()
    assert not profiler.is_last_step
    assert not profiler.close()
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith(f"profiler: the trace could not be written to {tmp_path}: ")
    assert "No space left on device" in message


def test_a_run_that_ends_early_has_a_trace_up_to_its_end(tmp_path):
    profiler = Profiler(ProfilerConfig(start_step=1, num_steps=100), str(tmp_path))
    assert steps(profiler, 3) == []
    assert profiler.close()
    assert not profiler.close()
    assert traced_steps(tmp_path) == {2, 3}
