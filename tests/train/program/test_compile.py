"""The step is compiled once for each batch size, ahead of its first call, and its times are logged."""

import jax
import numpy as np
import pytest

from lmtrain.run.config import RunConfig
from lmtrain.sharding.placement import LocalPart
from lmtrain.train.program import compile as module
from lmtrain.train.program.compile import CompilingStep, compilation_cache
from lmtrain.train.program.program import build_program

SIZES = [{"start": 0, "value": 4}, {"start": 2, "value": 8}]


@pytest.fixture(scope="module")
def compiled():
    """Compilation events of XLA or its cache: a list that grows with each compiled program."""
    events = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def program(**changes):
    model = {"type": "gpt2", "hidden_dim": 16, "num_heads": 2, "num_layers": 1, "seq_len": 8} | changes
    trainer = {"train_batch_size": SIZES, "num_train_steps": 10}
    return build_program(RunConfig(model=model, trainer=trainer), 24)


def batch(planned, rows: int, length: int = 8):
    local = {"tokens": np.full((rows, length), 3, np.int32), "loss_mask": np.ones((rows, length), bool)}
    return LocalPart.of(planned.layout.batch, rows, length).place(local)


def test_calls_run_the_program_compiled_ahead_without_another_compilation(compiled):
    planned = program()
    step, state = CompilingStep(planned.train_step), planned.init()
    by_compile, by_call, new = [], [], []
    for rows in (4, 4, 4, 8, 8, 4):
        data = jax.block_until_ready(batch(planned, rows))
        before = len(compiled)
        new.append(step.is_new(data))
        assert step.is_new(data) == new[-1]  # asking changes nothing
        if new[-1]:
            step.compile(state, data)
        by_compile.append(len(compiled) - before)
        before = len(compiled)
        state, metrics, _ = step(state, data)
        jax.block_until_ready(metrics)
        by_call.append(len(compiled) - before)
    assert new == [True, False, False, True, False, False]
    assert by_compile == [1, 0, 0, 1, 0, 0]
    assert by_call == [0] * 6
    assert int(state.step) == 6
    assert step.is_new(batch(planned, 4, length=4))
    _, plain, _ = program().train_step(planned.init(), batch(planned, 4))
    _, ahead, _ = step(planned.init(), batch(planned, 4))
    assert float(ahead["train/loss"]) == float(plain["train/loss"])


def test_times_are_returned_and_logged(monkeypatch, caplog):
    seconds = iter([10.0, 12.5, 16.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(seconds))
    planned = program()
    state, data = planned.init(), batch(planned, 8)
    with caplog.at_level("INFO"):
        figures = CompilingStep(planned.train_step).compile(state, data)
    assert figures == {"compile/tracing_seconds": 2.5, "compile/seconds": 3.5}
    message = caplog.records[-1].message
    assert message == "compiled the step for 8 sequences of 8 tokens: 2.5 s of tracing, 3.5 s of XLA"


def test_programs_are_cached_in_the_folder_and_afterwards_where_they_were_before(tmp_path):
    def compile_new(number: float) -> None:
        jax.jit(lambda x: x * number + 1)(1.0)

    before = jax.config.jax_compilation_cache_dir
    with compilation_cache(None):
        assert jax.config.jax_compilation_cache_dir == before
    with compilation_cache(str(tmp_path)):
        compile_new(3.25)
    cached = len(list(tmp_path.iterdir()))
    assert cached > 0
    compile_new(4.25)
    assert jax.config.jax_compilation_cache_dir == before
    assert len(list(tmp_path.iterdir())) == cached
