"""The step is compiled once for each size of batch, ahead of its first call, and what it took is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.run_config import RunConfig
from lmtrain.sharding.placement import local_rows, place_batch
from lmtrain.train.compiling import CompilingStep
from lmtrain.train.program import plan_program

pytestmark = pytest.mark.usefixtures("quick_compiles")

SIZES = [{"start": 0, "value": 4}, {"start": 2, "value": 8}]


@pytest.fixture(scope="module")
def compiled():
    """How often XLA, or its cache, was asked for a program: a list that grows."""
    events = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def program():
    model = {"type": "gpt2", "hidden_dim": 16, "num_heads": 2, "num_layers": 1, "seq_len": 8}
    trainer = {"train_batch_size": SIZES, "num_train_steps": 10}
    return plan_program(RunConfig(model=model, trainer=trainer), 24)


def batch(planned, rows: int, length: int = 8):
    local = {"tokens": np.full((rows, length), 3, np.int32), "loss_mask": np.ones((rows, length), bool)}
    return place_batch(local, planned.layout.batch, local_rows(planned.layout.batch, rows), rows)


def test_what_was_compiled_ahead_is_what_the_calls_run_and_nothing_is_compiled_again(compiled):
    planned = program()
    step, state = CompilingStep(planned.train_step), planned.init()
    figures = []
    for rows in (4, 4, 4, 8, 8, 4):
        data = batch(planned, rows)
        jax.block_until_ready((data, state))
        before = len(compiled)
        if step.is_new(data):
            figures.append(step.compile(state, data))
            assert len(compiled) == before + 1
        state, metrics = step(state, data)
        jax.block_until_ready((state, metrics))
        assert len(compiled) == before + (rows not in (4, 8) or len(figures) > len(figures[:-1]) and len(compiled) > before)
    assert len(figures) == 2
