"""Every family compiled by the TPU's and the GPU's compiler: attention, memory, FLOPs, loops."""

import pytest
from compiled.plans import GPU, POD, family, plan

SHIPPED = {"tpu": ("gpt2_small", "--device", "v5e-4"), "gpu": ("gpt2_small", "--device", "h100", "--devices", "8")}

# family -> attention on the TPU; on the GPU all families use the same kernels
FAMILIES = {"gpt2": "splash", "llama2": "splash", "mpt": "xla", "backpack": "xla"}
CASES = [(name, device) for name in FAMILIES for device in ("tpu", "gpu")]


# these cover as much on the GPU as the others, in a sixth of the time
LONG = {("mpt", "tpu"), ("backpack", "tpu")}
PARAMS = [pytest.param(case, marks=pytest.mark.long if case in LONG else (), id="-".join(case)) for case in CASES]


@pytest.fixture(params=PARAMS, scope="module")
def compiled(request):
    name, device = request.param
    attention = FAMILIES[name] if device == "tpu" else "triton"
    if name == "gpt2":  # as shipped, with evaluation
        return plan(*SHIPPED[device]), attention
    if device == "gpu":
        return plan(*family(name, 32), *GPU), attention
    return plan(*family(name, 1024 if name == "backpack" else 256), *POD), attention


def test_attention_uses_the_kernel_of_the_device(compiled):
    found, attention = compiled
    assert found["attention"] == attention
    kernels = {kernel["where"].partition(":")[0] for kernel in found["kernels"]}
    kernels = {"models/attention/triton" if "/triton/" in where else where for where in kernels}
    where = {"xla": set(), "splash": {"models/attention/splash.py"}, "triton": {"models/attention/triton"}}
    assert kernels == where[attention]


def test_packed_documents_have_a_kernel_of_cudnn_on_gpus_from_hopper_on():
    """It takes over where JAX has no Triton backend; the branch for many documents does not count."""
    found = plan(*family("llama2", 32), *GPU, "--model.attn_backend", "cudnn_packed")
    assert {kernel["where"].partition(":")[0] for kernel in found["kernels"]} == {"models/attention/cudnn_packed.py"}
    assert all(loop["known"] for loop in found["loops"])
    assert found["flops"]["redundant"] <= 0.05 * found["flops"]["model"]


def test_it_fits_and_the_state_is_a_part_of_the_arguments(compiled):
    found, _ = compiled
    memory = found["memory"]
    assert found["fits"]
    assert memory["arguments"] < memory["peak"] < memory["capacity"]
    assert 0.9 * memory["arguments"] < memory["state"] <= memory["arguments"]


def test_flops_are_the_models_and_one_recomputed_forward_pass(compiled):
    """All families but gpt2 recompute blocks: at least the forward pass without products that only its output needs."""
    flops = compiled[0]["flops"]
    assert flops["redundant"] <= 0.05 * flops["model"]
    if "eval" not in compiled[0]:
        assert 0.05 * flops["model"] < flops["recomputed"] < 0.35 * flops["model"]
    else:
        assert flops["recomputed"] == 0
        evaluation = compiled[0]["eval"]["flops"]
        assert evaluation["compiled"] == pytest.approx(evaluation["model"], rel=0.05)


def test_layers_are_a_loop_and_every_trip_count_is_known(compiled):
    found, _ = compiled
    assert 4 in {loop["times"] for loop in found["loops"]} or "eval" in found  # gpt2 is unrolled
    assert all(loop["known"] for loop in found["loops"])


def test_collectives_use_the_data_axis_and_name_their_source_lines(compiled):
    found = compiled[0]
    large = [row for row in found["collectives"] if row["bytes"] > 1e6]
    assert large
    for row in large:
        assert row["axes"] == ["data"]
        assert row["where"].endswith(tuple("0123456789")), row
        assert row["network"] in ("ICI", "NVLink")


def test_the_bound_on_utilization_follows_from_the_flops(compiled):
    """The model's FLOPs count full attention; the kernel computes half of it."""
    flops = compiled[0]["flops"]
    most = (flops["model"] + flops["attention_model"]) / (flops["compiled"] + flops["attention"])
    assert 0 < compiled[0]["mfu_bound"] <= most
