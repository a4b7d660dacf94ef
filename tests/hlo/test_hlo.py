"""Parsing of HLO text."""

import pytest

from lmtrain.compiled.hlo import parse_hlo


def test_text_without_an_entry_computation_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("HloModule nothing\n")
