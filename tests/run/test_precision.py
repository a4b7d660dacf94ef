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
        ("c=bf16", (F32, BF16)),
        ("p=bf16", (BF16, BF16)),
        ("o=bf16,c=bf16", (F32, BF16)),
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
        ("f16", "float16"),
        ("f64", "'f64'"),
        ("p=f32,c", "'c'"),
        ("x=f32", "'x'"),
        ("p=f32,c=bf16,o=f32", "remove o"),
        ("p=f32,", "''"),
        ("p=f32,params=bf16", "params"),
        ("p=f32,q=int4", "q=int4"),
        ("fp8", "p=f32,c=bfloat16,q=fp8"),
    ],
)
def test_invalid_policies_are_refused(text, message):
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(mp=text)


def test_the_precision_of_a_config_as_text():
    assert str(TrainerConfig(mp="c=bf16,q=fp8").precision) == "params=float32, compute=bfloat16, products=fp8"
