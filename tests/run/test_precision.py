"""Mixed-precision policy: the setting `mp`."""

import pytest
from pydantic import ValidationError

from lmtrain.run.execution import Precision, parse_precision
from lmtrain.run.trainer import TrainerConfig

F32, BF16 = "float32", "bfloat16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32", (F32, F32)),
        ("bf16", (BF16, BF16)),
        ("p=f32,c=bfloat16", (F32, BF16)),
        ("c=bf16", (F32, BF16)),
        ("p=bf16", (BF16, BF16)),
        ("p=bf16,c=f32", (BF16, F32)),
        ("o=bf16,c=bf16", (F32, BF16)),
        ("p=f32,c=bfloat16,q=fp8", (F32, BF16, "fp8")),
        ("c=bf16,q=float8", (F32, BF16, "fp8")),
        ("q=fp8_full,c=bf16", (F32, BF16, "fp8")),
        ("p=bf16,products=int8", (BF16, BF16, "int8")),
        (" params = float32 , compute = bf16 , output = bf16 ", (F32, BF16)),
    ],
)
def test_defaults_of_missing_parts(text, expected):
    assert parse_precision(text) == Precision(*expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f16", "float16 needs loss scaling"),
        ("f64", "unknown dtype 'f64'"),
        ("p=f32,c", "'c' has no dtype; expected for example c=bfloat16"),
        ("x=f32", "unknown name 'x'; expected p, c or q"),
        ("p=f32,c=bf16,o=f32", "the output dtype cannot be set: .*; remove o"),
        ("p=f32,", "'' has no dtype"),
        ("p=f32,params=bf16", "params is set twice"),
        ("p=f32,q=int4", "unknown format of products q=int4; expected fp8 or int8, or remove q"),
        ("fp8", "fp8 is a format of products only; write p=f32,c=bfloat16,q=fp8"),
    ],
)
def test_invalid_policies_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_precision(text)
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(mp=text)


def test_the_precision_of_a_config_as_text():
    precision = TrainerConfig(mp="p=f32,c=bf16").precision
    assert str(precision) == "params=float32, compute=bfloat16"
    assert str(TrainerConfig(mp="c=bf16,q=fp8").precision) == "params=float32, compute=bfloat16, products=fp8"
