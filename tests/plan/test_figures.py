"""Figures of a compiled step as plain data."""

from types import SimpleNamespace

import pytest

from lmtrain.models.attention.kernel import kernel_of
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.plan.figures import backward_flops, memory_of


@pytest.mark.parametrize(
    ("platform", "compiler", "peak"), [("tpu", 500, 500), ("gpu", 5000, 950), ("cpu", 500, 950), ("tpu", 0, 950)]
)
def test_the_peak_of_memory_depends_on_what_the_compiler_counts(platform, compiler, peak):
    stats = {"argument": 400, "output": 300, "alias": 250, "temp": 500, "host_temp": 7, "host_argument": 1}
    values = {f"{name}_size_in_bytes": size for name, size in stats.items()} | {"peak_memory_in_bytes": compiler}
    memory = memory_of(SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**values)), platform)
    assert memory == {"arguments": 400, "temporary": 500, "peak": peak, "total": 950, "host": 8}


@pytest.mark.parametrize(
    ("kernel", "plain", "latent"), [("triton", 3.5, 3.6), ("splash", 3.5, 2.6), ("cudnn", 2.5, 2.6)]
)
def test_the_backward_pass_of_attention_follows_the_widths_of_keys_and_values(kernel, plain, latent):
    """Of heads of 128, and of latent attention with keys of 192 and values of 128."""
    sizes = {"hidden_dim": 256, "num_heads": 2, "num_layers": 2, "seq_len": 64}
    found = [backward_flops(LlamaConfig(**sizes, **more), kernel_of(kernel)) for more in ({}, {"latent_attention": {}})]
    assert found == pytest.approx([plain, latent])
