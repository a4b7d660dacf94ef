"""The coordinate check: with transfer, ten steps change the logits as much at every width. tools/bench/coordinates.py
prints all families and optimizers. The folded form of CompleteP is the published one, to the last bit."""

import json
from pathlib import Path

import pytest
from forked import run_script
from transfer.coordinates import MODELS, rate_of, slope

WIDTHS = (64, 256)


@pytest.mark.parametrize(
    ("name", "optimizer", "transfer"),
    [
        ("llama", "adam", True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("llama", "adam", False), ("mixture", "lion", True))
        ),
    ],
)
def test_the_change_of_the_logits_does_not_grow_with_the_width(name, optimizer, transfer):
    """Without transfer it does."""
    family, model = MODELS[name]
    found = slope(family, {"type": optimizer}, rate_of(family, optimizer), transfer, WIDTHS, **model)
    assert abs(found) < 0.15 if transfer else found > 0.4


SCRIPT = Path(__file__).with_name("published_steps.py")


@pytest.mark.parametrize("head", ["tied", pytest.param("untied", marks=pytest.mark.long)])
def test_losses_of_the_folded_form_are_those_with_published_multipliers(tmp_path, head):
    """In float64, with clipping, decay and a large epsilon, of 4 times the width and 2 times the depth of the base."""
    output = tmp_path / "losses.json"
    run_script(SCRIPT.read_text(), output, head, folder=tmp_path)
    folded, published = json.loads(output.read_text())
    assert len(folded) == len(set(folded)) == 8
    assert folded == published
