"""The source lines of executions, and which branches count."""

import jax
from hlo.programs import ALONE, NESTED_LOOPS, count_flops

from lmtrain.compiled.executions import RARELY
from lmtrain.compiled.figures import measure


def test_places_are_the_innermost_lines_of_the_package():
    found = measure(NESTED_LOOPS, ALONE)
    assert [product.where for product in found.products] == ["models/layers/linear.py:56"]
    assert found.loops[0].where == "models/gpt2/model.py:154"


def test_a_branch_that_hardly_ever_runs_does_not_count():
    def program(scope):
        def seldom(x):
            with jax.named_scope(scope):
                return x @ x @ x

        return lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, seldom, x)

    # two sizes: the compilation cache ignores scopes
    assert count_flops(program(RARELY), (16, 16))[0] == 2 * 16**3
    assert count_flops(program("often"), (8, 8))[0] == 3 * 2 * 8**3
