"""`expert_axis_size: auto`: experts are split where sending their parameters takes longer than their products."""

import pytest
from sharding.test_mesh import FakeDevice

from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import ACCELERATORS
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.parts import choose_expert_parts

HOSTS = [FakeDevice(number, number // 8, number // 8, "cuda", "NVIDIA H100") for number in range(64)]
SIZES = {"type": "llama", "hidden_dim": 2048, "num_heads": 16, "num_layers": 2, "seq_len": 4096}
QWEN = SIZES | {"moe": {"num_experts": 128, "experts_per_token": 8, "intermediate_dim": 768}}


def choose(devices=HOSTS, model=QWEN, replicas=1, accelerator="h100", **trainer):
    settings = {"mp": "p=f32,c=bfloat16", "train_batch_size": 256} | trainer
    config = RunConfig.model_validate({"model": model, "trainer": settings})
    return choose_expert_parts(config, devices, None, replicas, ACCELERATORS.get(accelerator))


def test_small_experts_over_several_hosts_exchange_tokens():
    """Bytes of experts 3 * 128 * 2048 * 768 * 2 = 1.21 GB, of tokens 4 * 4096 * 2048 * 2 = 67 MB: with 4 devices
    (3 / 4 * 1.21 * (1 - 4 / 8) + 5 * 3 * 0.067) / 450 + 3 * 1.21 / 8 * 7 / 8 / 50 = 11.2 ms; with FSDP
    (3 * 1.21 * 7 / 8) / 450 + 7.9 ms = 15.0; products take 3.8 ms."""
    number, reason = choose()
    assert (number, reason) == (4, "11.2 ms of communication per layer, 15 with FSDP")


def test_products_that_take_longer_hide_fsdp():
    number, reason = choose(train_batch_size=2048)
    assert number == 1
    assert reason.startswith("FSDP sends experts in 15 ms per layer, hidden by")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"devices": HOSTS[:8]}, "one slice or host has all parameters"),
        ({"replicas": 8}, "one slice or host has all parameters"),
        ({"accelerator": "none"}, "the networks of the devices are unknown"),
        ({"context_axis_size": 16}, "experts are split within a slice or host"),
    ],
)
def test_otherwise_fsdp_splits_them(changes, reason):
    assert choose(**changes) == (1, reason)


def test_an_explicit_number_is_kept_and_refused_without_experts():
    assert choose(expert_axis_size=2) == (2, "")
    assert choose(model=SIZES) == (1, "")
    with pytest.raises(UserError, match=r"expert_axis_size: 2: the model has no mixture of experts .* remove it"):
        choose(model=SIZES, expert_axis_size=2)
