"""The folded form of CompleteP is the published one with multipliers, to the last bit."""

import json
from pathlib import Path

from forked import run_script

SCRIPT = Path(__file__).with_name("published_steps.py")


def test_losses_of_the_folded_form_are_those_with_published_multipliers(tmp_path):
    """In float64, with clipping, decay and a large epsilon, of 4 times the width and 2 times the depth of the base."""
    output = tmp_path / "losses.json"
    run_script(SCRIPT.read_text(), output, folder=tmp_path)
    found = json.loads(output.read_text())
    assert found.keys() == {"False", "True"}  # tied
    for folded, published in found.values():
        assert len(folded) == 20
        assert len(set(folded)) > 10
        assert folded == published
