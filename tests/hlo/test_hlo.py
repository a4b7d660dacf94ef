"""Parsing of HLO text: computations and array types."""

import pytest

from lmtrain.compiled.hlo import Shape, parse_hlo, parse_shapes


def test_text_without_an_entry_computation_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_hlo("HloModule nothing\n")


def test_shapes_have_sizes_types_and_memory_spaces():
    assert parse_shapes("(bf16[12,768]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[3]{0}, f32[], pred[2,<=4])") == [
        Shape("bf16", (12, 768), 1),
        Shape("s4", (3,)),
        Shape("f32", ()),
        Shape("pred", (2, 4)),
    ]
    kinds = {"bf16": 12, "s4": 3, "f32": 24, "pred": 6, "f8e4m3fn": 6, "c64": 48}
    assert {kind: Shape(kind, (6,)).bytes for kind in kinds} == kinds
    assert Shape("f32", (6,), 1).hbm_bytes == 0
