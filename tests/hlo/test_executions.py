"""The source lines of executions."""

from hlo.programs import ALONE, NESTED_LOOPS

from lmtrain.compiled.figures import measure


def test_places_are_the_innermost_lines_of_the_package():
    found = measure(NESTED_LOOPS, ALONE)
    assert [product.where for product in found.products] == ["models/layers/linear.py:56"]
    assert found.loops[0].where == "models/gpt2/model.py:154"
