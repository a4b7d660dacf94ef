"""Microbatches: each has every n-th row and its own key. `test_step.py` compares losses and gradients."""

import jax
import jax.numpy as jnp
import pytest

from lmtrain.train.step.hessian import sum_over_microbatches


def parts_of(number: int, rows: int = 8):
    """(rows, key) of each microbatch in the order of computing, and the sum of the rows."""
    seen = []

    def function(micro, key):
        def note(rows, data):
            seen.append((rows.tolist(), tuple(data.tolist())))

        jax.debug.callback(note, micro["row"], jax.random.key_data(key), ordered=True)
        return {"sum": micro["row"].sum().astype(jnp.float32)}

    batch = {"row": jnp.arange(rows), "wide": jnp.zeros((rows, 3))}
    total = jax.jit(lambda: sum_over_microbatches(function, batch, jax.random.key(3), number))()
    jax.effects_barrier()
    return seen, float(total["sum"])


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_each_microbatch_has_every_nth_row(number):
    seen, total = parts_of(number)
    assert [rows for rows, _ in seen] == [list(range(first, 8, number)) for first in range(number)]
    assert total == sum(range(8))


def test_each_microbatch_has_its_own_key_which_is_the_same_at_each_call():
    keys = [key for _, key in parts_of(4)[0]]
    assert len(set(keys)) == 4
    assert [key for _, key in parts_of(4)[0]] == keys


def test_several_bfloat16_microbatches_are_summed_in_float32():
    """The sum of 257 ones: in bfloat16, 256 + 1 is 256."""

    def function(micro, key):
        return micro.sum(dtype=jnp.bfloat16)

    total = jax.jit(lambda x: sum_over_microbatches(function, x, jax.random.key(0), 257))(jnp.ones(257, jnp.bfloat16))
    assert total.dtype == jnp.float32
    assert float(total) == 257
