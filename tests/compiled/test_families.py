"""Every family compiled by the TPU's and the GPU's compiler: attention, memory beside the estimate, products, loops."""

import pytest
from compiled.plans import FOUR, MPT_7B, plan

GPT2 = ("gpt2_small", *FOUR, "--trainer.train_batch_size", "256", "--trainer.per_device_parallelism", "16")
LLAMA = ("llama2_7b", *FOUR, "--trainer.train_batch_size", "32")
MPT = ("mpt_7b_continued", *MPT_7B, "--trainer.train_batch_size", "32")
BACKPACK = ("backpack_small", *FOUR, "--trainer.train_batch_size", "128", "--trainer.per_device_parallelism", "16")

TPU, GPU = ("--device", "v5p", "--topology", "2x2x2"), ("--device", "h100", "--devices", "8")

# family -> config, attention on the TPU and on the GPU
FAMILIES = {
    "gpt2": (GPT2, "splash", "xla"),
    "llama": (LLAMA, "splash", "blockwise"),
    "mpt": (MPT, "xla", "xla"),
    "backpack": (BACKPACK, "xla", "xla"),
}
CASES = [(family, device) for family in FAMILIES for device in ("tpu", "gpu")]


@pytest.fixture(params=CASES, ids=[f"{family}-{device}" for family, device in CASES], scope="module")
def compiled(request):
    family, device = request.param
    config, on_tpu, on_gpu = FAMILIES[family]
    # evaluation is the same for all; a compile takes the better part of a minute
    steps = () if (family, device) == ("llama", "gpu") else ("--step", "train")
    return plan(*config, *(TPU if device == "tpu" else GPU), *steps), on_tpu if device == "tpu" else on_gpu


def test_attention_is_what_the_device_has(compiled):
    found, attention = compiled
    assert found["attention"] == attention
    kernels = {kernel["where"].partition(":")[0] for kernel in found["kernels"]}
    assert kernels == ({"models/layers/splash.py"} if attention == "splash" else set())


def test_it_fits_and_the_estimate_agrees_with_the_compiler(compiled):
    found, _ = compiled
    memory = found["memory"]
    assert found["fits"]
    assert memory["arguments"] < memory["peak"] < memory["capacity"]
    if memory["peak"] > 2**30:
        assert memory["estimate"] == pytest.approx(memory["peak"], rel=0.15)


def test_products_are_the_models_and_one_forward_pass_again(compiled):
    """All recompute blocks: at least a forward pass of the blocks without what only its own output needs."""
    flops = compiled[0]["flops"]
    assert flops["redundant"] <= 0.05 * flops["model"]
    assert 0.05 * flops["model"] < flops["recomputed"] < 0.35 * flops["model"]
    if "eval" in compiled[0]:
        evaluation = compiled[0]["eval"]["flops"]
        assert evaluation["compiled"] == pytest.approx(evaluation["model"], rel=0.05)


def test_layers_are_a_loop_and_every_trip_count_is_known(compiled):
    found, _ = compiled
    assert 4 in {loop["times"] for loop in found["loops"]}
    assert all(loop["known"] for loop in found["loops"])


def test_collectives_lie_along_the_data_axis_and_name_their_lines(compiled):
    found = compiled[0]
    large = [row for row in found["collectives"] if row["bytes"] > 1e6]
    assert large
    for row in large:
        assert row["axes"] == ["data"]
        assert row["where"].endswith(tuple("0123456789")), row
        assert row["network"] in ("ICI", "NVLink")


def test_the_bound_is_the_sum_of_its_parts(compiled):
    seconds = compiled[0]["seconds"]
    hidden = seconds["wire"] - seconds["wire_synchronous"]
    expected = max(seconds["products"], seconds["hbm"], hidden) + seconds["wire_synchronous"]
    assert seconds["total"] == pytest.approx(expected)
    assert 0 < compiled[0]["mfu_bound"] < 1
