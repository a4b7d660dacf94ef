"""Measurement of a step, with a clock that the test controls."""

import numpy as np
import pytest
from plan.workers import local_request

from lmtrain.plan import measure
from lmtrain.train.program.program import Program, build_program


@pytest.mark.parametrize(("seconds", "steps"), [(0.25, 20), (4.0, 3)])
def test_the_time_of_a_step_is_the_median_without_the_first(monkeypatch, seconds, steps):
    program, now, given = build_program(local_request(True, train_batch_size=4).run_config, 100), [0.0], []

    class Compiled:
        def __call__(self, state, batch):
            given.append({name: np.shape(values) for name, values in batch.items()})
            now[0] += seconds if given[1:] else 1.0
            return state, {}, None

        def as_text(self):
            return "text"

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Program, "compile", lambda self: Compiled())
    monkeypatch.setattr(Program, "init", lambda self: None)
    monkeypatch.setattr(measure, "compiled_figures", lambda *arguments: {"seconds": {"products": 0.1}})
    figures = measure.measure(program, None)
    assert figures["seconds"] == {"products": 0.1, "total": seconds, "steps": steps}
    assert figures["tokens_per_second"] == 4 * 64 / seconds
    assert given[0]["tokens"] == given[0]["loss_mask"] == (4, 64)
