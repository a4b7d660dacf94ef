"""The `mp` setting."""

import pytest
from pydantic import ValidationError

from lmtrain.run.precision import Precision, parse_precision
from lmtrain.run.trainer import TrainerConfig

F32, BF16 = "float32", "bfloat16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32", (F32, F32)),
        ("full", (F32, F32)),
        ("bf16", (BF16, BF16)),
        ("bfloat16", (BF16, BF16)),
        ("p=f32,c=bfloat16", (F32, BF16)),
        ("c=bf16", (F32, BF16)),
        ("p=bf16", (BF16, BF16)),
        ("p=bf16,c=f32", (BF16, F32)),
        ("o=bf16,c=bf16", (F32, BF16)),
        (" params = float32 , compute = bf16 , output = bf16 ", (F32, BF16)),
    ],
)
def test_what_is_missing_follows(text, expected):
    assert parse_precision(text) == Precision(*expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f16", "float16 needs loss scaling"),
        ("p=f32,c=half", "float16 needs loss scaling"),
        ("f64", "no number format 'f64'"),
        ("", "no number format ''"),
        ("p=", "no number format ''"),
        ("p=f32,c", "'c' names no format; write it like c=bfloat16"),
        ("x=f32", "'x' is none of p, c "),
        (
            "p=f32,c=bf16,o=f32",
            "the output has no format of its own: logits have that of the computation .*; leave o out",
        ),
        ("o=bf16", "leave o out"),
        ("p=f32,", "'' names no format"),
        ("p=f32,params=bf16", "params is given twice"),
        ("p=f32=bf16", "no number format 'f32=bf16'"),
    ],
)
def test_anything_else_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_precision(text)
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(mp=text)


def test_a_config_gives_its_precision_and_a_log_line():
    precision = TrainerConfig(mp="p=f32,c=bf16").precision
    assert str(precision) == "params=float32, compute=bfloat16"
