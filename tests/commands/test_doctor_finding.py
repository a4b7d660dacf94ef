"""A finding as lines of text."""

import pytest

from lmtrain.commands.doctor import Finding


@pytest.mark.parametrize(
    ("finding", "lines"),
    [
        (Finding(what="disk", seen="all there"), ["ok   disk         all there"]),
        (
            Finding(what="disk", seen="full", state="BAD", fix="delete"),
            ["BAD  disk         full", "                  -> delete"],
        ),
    ],
)
def test_a_finding_is_one_line_and_one_with_the_fix(finding, lines):
    assert finding.lines() == lines
