"""What each policy keeps between forward and backward pass, listed by JAX; barriers around products."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from parity.variants import make

from lmtrain.models.attention import splash
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2Block
from lmtrain.models.interface import Documents
from lmtrain.models.layers import remat as barriers
from lmtrain.models.layers.remat import remat
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaBlock

SIZES = {"hidden_dim": 16, "num_heads": 4, "num_layers": 3, "seq_len": 12}
BLOCKS = {  # Backpack's trunk consists of GPT-2's, and MPT's have their shapes
    "gpt2": (Gpt2Block, Gpt2Config(**SIZES, mlp_scale=2)),
    "llama": (LlamaBlock, LlamaConfig(**SIZES, intermediate_dim=32, num_kv_heads=2)),
}
INPUT = "f32[5,12,16] from the argument x"
MIXED = "f32[5,4,12,4] named 'attention'"


def loss_of(family: str, policy: bool | str, backend: str, scan: bool = True, length: int = 12):
    """A function of a block's parameters and input, and their shapes."""
    kind, config = BLOCKS[family]
    x = jax.ShapeDtypeStruct((5, length, 16), jnp.float32)
    plain = kind(config, "xla")
    params = nn.meta.unbox(jax.eval_shape(lambda x: plain.init(jax.random.key(0), x, 0, True, Documents()), x))[
        "params"
    ]
    block = remat(kind, policy, scan, static_argnums=(3,))(config, backend)

    def loss(params, x):
        return block.apply({"params": params}, x, jnp.int32(0), True, Documents())[0].sum()

    return loss, params, x


def kept(capsys, family: str, policy: bool | str, backend: str = "xla") -> list[str]:
    """The kept values other than parameters and constants: type, shape and origin."""
    print_saved_residuals(*loss_of(family, policy, backend))
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not re.search(r"from (the argument params|a constant)", line)]


of_every_family = pytest.mark.parametrize("family", list(BLOCKS))


@of_every_family
def test_full_keeps_only_the_input_of_the_block_and_offload_in_host_memory(capsys, family):
    assert kept(capsys, family, True) == [INPUT]
    assert kept(capsys, family, "full", "blockwise") == [INPUT]
    (value,) = kept(capsys, family, "offload")
    assert value.startswith("f32<host>[5,12,16] output of device_put ")


@of_every_family
def test_dots_keeps_only_the_results_of_matrix_products_and_of_attention(capsys, family):
    first, *dots = kept(capsys, family, "dots")
    assert first == INPUT
    (mixed,) = [dot for dot in dots if " output of dot_general " not in dot]
    assert mixed.split(" from ")[0] == MIXED
    shapes = {dot.split()[0] for dot in dots}
    scores = "f32[5,2,24,12]" if family == "llama" else "f32[5,4,12,12]"
    assert shapes > {scores, "f32[60,32]"}


@of_every_family
def test_dots_no_batch_keeps_products_with_weights_and_not_those_of_attention(capsys, family):
    first, *dots = kept(capsys, family, "dots_no_batch")
    assert first == INPUT
    assert all(" output of dot_general " in dot and "(Linear.without_bias)" in dot for dot in dots)
    qkv = ["f32[60,4,4]", "f32[60,2,4]", "f32[60,2,4]"] if family == "llama" else ["f32[60,3,4,4]"]
    up = ["f32[60,32]"] * (2 if family == "llama" else 1)
    assert [dot.split()[0] for dot in dots] == [*qkv, "f32[60,16]", *up]


@of_every_family
def test_save_attention_keeps_its_output_and_the_log_sums_of_blocks_and_does_not_recompute_them(capsys, family):
    first, *saved = kept(capsys, family, "save_attention")
    assert (first, [value.split(" from ")[0] for value in saved]) == (INPUT, [MIXED])
    first, *saved = kept(capsys, family, "save_attention", "blockwise")
    assert first == INPUT
    heads = "2,2" if family == "llama" else "4,1"
    assert [value.split(" from ")[0] for value in saved] == [
        f"f32[5,{heads},12,4] named 'attention'",
        f"f32[5,{heads},12] named 'attention'",
    ]

    def loops(policy):
        loss, *shapes = loss_of(family, policy, "blockwise")
        return jax.jit(jax.value_and_grad(loss)).lower(*shapes).as_text().count("stablehlo.while")

    # two nested loops: forward, recomputation if any, backward
    assert (loops(False), loops("full"), loops("save_attention")) == (4, 6, 4)
    assert (loops("dots"), loops("dots_no_kernels")) == (4, 6)


def test_unrolled_recomputation_is_not_merged_with_the_forward_pass():
    for scan in (True, False):
        loss, *shapes = loss_of("gpt2", "full", "xla", scan)
        text = jax.jit(jax.grad(loss)).lower(*shapes).as_text()
        assert ("optimization_barrier" in text) == (not scan)


@pytest.mark.parametrize(
    ("variant", "policy", "scan", "values"),
    [
        ("gpt2", "full", False, {"f32[3,5,12,16]"}),
        ("gpt2", "save_attention", True, {"f32[3,5,12,16]", "f32[3,5,4,12,4]"}),
        ("llama", "offload", False, {"f32<host>[3,5,12,16]"}),
        ("mpt", "full", True, {"f32[3,5,12,16]"}),
        ("backpack", "full", True, {"f32[3,5,12,16]"}),
    ],
)
def test_kept_values_of_each_layer_of_a_model(capsys, variant, policy, scan, values):
    small = make(variant, gradient_checkpointing=policy, scan_layers=scan, num_layers=3)
    tokens = np.zeros((5, 12), np.int32)

    def loss(params):
        return (small.model.apply({"params": params}, tokens, True, method="hidden") ** 2).sum()

    print_saved_residuals(loss, small.params)
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if re.match(r"\S+\[3,.* output of scan ", line)} == values


def test_save_attention_and_dots_do_not_recompute_the_kernel_on_a_tpu(monkeypatch):
    monkeypatch.setattr(splash, "platform", lambda: "tpu")

    def kernels(policy):
        loss, *shapes = loss_of("gpt2", policy, "splash", length=128)
        text = jax.jit(jax.value_and_grad(loss)).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
        return re.findall(r'kernel_name = "splash_mha_(\w+?)_', text)

    assert kernels("full") == ["fwd", "fwd", "dkv", "dq"]
    assert kernels("save_attention") == kernels("dots") == ["fwd", "dkv", "dq"]
    assert kernels("dots_no_kernels") == ["fwd", "fwd", "dkv", "dq"]


def gradients():
    """The compiled text of a block's gradients, before the compiler has optimised it, and the gradients."""
    block = LlamaBlock(BLOCKS["llama"][1], "xla")
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    params = block.init(jax.random.key(0), x, jnp.int32(0), True, Documents())

    def loss(params, x):
        return (block.apply(params, x, jnp.int32(0), True, Documents())[0] ** 2).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x)
    return traced.as_text(), traced.compile()(params, x)


def test_a_block_has_them_on_tpus_only_and_computes_the_same(monkeypatch):
    plain, expected = gradients()
    monkeypatch.setattr(barriers, "platform", lambda: "tpu")
    text, found = gradients()
    assert plain.count("optimization_barrier") == 0
    # inputs and outputs of attention and MLP, the gradients of these four, the gradient of the MLP's input as tokens,
    # and that of its hidden units
    assert text.count("optimization_barrier") == 10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)


@pytest.mark.parametrize("function", [barriers.unfused, barriers.unfused_gradient])
def test_second_derivatives_pass_through(monkeypatch, function):
    monkeypatch.setattr(barriers, "platform", lambda: "tpu")
    slope = jax.grad(lambda x: function(x) ** 3)
    assert jax.jvp(slope, (2.0,), (1.0,))[1] == 12.0
