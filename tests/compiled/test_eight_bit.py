"""Products in 8 bits in compiled steps: which products have them, their bytes on the wire, and whether they pay."""

import pytest
from compiled.plans import FOUR, GPU, plan

FP8 = ("--trainer.mp", "p=f32,c=bfloat16,q=fp8")
INT8 = ("--trainer.mp", "p=f32,c=bfloat16,q=int8")
ONE_EACH = ("--trainer.train_batch_size", "8", "--trainer.per_device_parallelism", "1")
FULL = ("--trainer.per_device_parallelism", "1", "--model.gradient_checkpointing", "full")


def in_16_bits(found):
    """The sources of products that do not have 8 bits."""
    return {row["where"].partition(":")[0] for row in found["products"] if not row["eight_bit"]}


def test_all_products_of_the_blocks_have_8_bits_on_an_h100():
    """21 of 24 products of four layers: those of the head, forward and both gradients, keep 16 bits."""
    found = plan("llama3_8b", *FOUR, *ONE_EACH, *GPU, *FP8)
    assert in_16_bits(found) == {"objectives/chunked_sums.py"}
    assert found["flops"]["eight_bit"] == pytest.approx(found["flops"]["compiled"] - 25.8e12, rel=0.01)
    assert found["wire_bytes"] <= 6e9  # 7.46 GB with 16 bits


def test_llama3_8b_on_8_h100_takes_at_most_0_7_of_the_bound_with_16_bits():
    found = plan("llama3_8b", *ONE_EACH, *GPU, *FP8)
    assert found["eight_bit"]["pays"]
    assert found["eight_bit"]["bound"] <= 0.65
    assert found["wire_bytes"] <= 28e9  # 39.5 GB with 16 bits
    assert found["hbm_bytes"] <= 680e9


def test_experts_have_8_bits_on_an_h100():
    found = plan("qwen3_30b_a3b", *FOUR, *ONE_EACH, *GPU, *FP8)
    assert found["flops"]["experts_in_8_bits"] == found["flops"]["experts_by_formula"] > 0
    assert found["hbm_bytes"] <= 130e9  # 147 GB with 16 bits
    assert found["wire_bytes"] <= 11e9  # 14.8 GB


def test_where_memory_is_the_limit_8_bits_are_not_advised():
    found = plan("gpt2_small", *GPU, *FP8)
    assert found["eight_bit"]["bound"] > 1
    assert not found["eight_bit"]["pays"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "least", "most"),
    [("v6e-64", 0.93, 0.97), pytest.param("v5e-64", 0.6, 0.8, marks=pytest.mark.release)],
)
def test_int8_pays_on_a_v5e_and_not_on_a_v6e(device, least, most):
    """By the cycles that XLA:TPU estimates. On a v6e, converting costs most of what products save: a result below the
    budget of 0.92 would mean that it can be allowed there (`SLOW_FORMATS`)."""
    found = plan("llama3_8b", "--device", device, "--step", "train", "--trainer.train_batch_size", "64", *FULL, *INT8)
    assert in_16_bits(found) <= {"objectives/chunked_sums.py"}
    assert least <= found["eight_bit"]["cycles"] <= most
    assert found["eight_bit"]["pays"] == (most <= 0.92)
