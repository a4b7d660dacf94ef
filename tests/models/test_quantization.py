"""Which products of a training step have 8 bits, by the types in its program; copies and stored parameters."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import families, quick
from parity.variants import make, tokens

from lmtrain.models.layers.four_bits import ARRAYS, Blocks
from lmtrain.models.layers.quantized import FORMATS, QUANTIZED, Quantized
from lmtrain.models.params import copies, flatten, has_copy, parameter_axes, stored, take_stored, unflatten
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.objectives.interface import LOSS, Weighted
from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import build_program
from lmtrain.train.step.parts import choose_parts
from lmtrain.train.step.step import TrainStep

EIGHT_BITS = {str(kind) for types in FORMATS.values() for kind in types}
# Products with weights in a block.
BLOCK = {"gpt2": 4, "mistral": 7, "mpt": 4, "backpack": 4}


def step_operands(model, values, batch, products, dtype="bfloat16"):
    number = defaultdict(lambda: 1)
    step = TrainStep(
        model=model,
        objective={LOSS: Weighted(CrossEntropy())},
        optimizer=quick.KEEPER,
        schedule=lambda step: 0.5,
        num_microbatches=number,
        compute_dtype=dtype,
        parts=choose_parts(products=products),
    )
    return quick.operands(step, quick.new_state(values), batch)


@pytest.mark.parametrize(
    ("family", "products"), [("gpt2", "int8"), ("mistral", "fp8"), ("mpt", "fp8"), ("backpack", "int8")]
)
def test_all_products_with_the_blocks_matrices_have_8_bits_and_no_others(family, products):
    """The head, embeddings, attention and what a Backpack has outside its blocks keep the type of the computation."""
    small = make(family)
    batch = {"tokens": tokens(), "loss_mask": np.ones(tokens().shape, bool)}
    before = step_operands(small.model, small.params, batch, None)
    after = step_operands(small.model, small.params, batch, products)
    values, gradients = (str(kind) for kind in FORMATS[products])
    small_ones = [pair for pair in after if EIGHT_BITS & set(pair)]
    each = BLOCK[family]
    # the text of a loop over layers has each product once
    expected = [(values, values)] * each + [(gradients, values)] * each + [(values, gradients)] * each
    assert sorted(small_ones) == sorted(expected)
    assert len(after) == len(before)
    assert not any(EIGHT_BITS & set(pair) for pair in before)


def test_experts_have_products_in_8_bits_and_routers_do_not():
    products = "fp8"
    model = families.moe_model(**families.MIXED)
    values = quick.random_params(model, 0.5)
    found = copies(values, products)
    assert {path.split("/")[1] for path in flatten(found)} == {"attn", "moe", "mlp"}
    assert not any("router" in path for path in flatten(found))
    assert any("experts/down/kernel" in path for path in flatten(found))
    assert not any("experts" in path for path in flatten(copies(values, products, experts=False)))
    kind = str(FORMATS[products].values)
    operands = step_operands(model, values, families.BATCH, products)
    # gate, up and down, each with the products of both gradients, in loops over experts and tiles
    assert sum(pair == (kind, kind) for pair in operands) >= 9


def test_without_q_the_program_is_the_same_as_without_the_setting():
    small = make("mistral")
    batch = {"tokens": tokens(), "loss_mask": np.ones(tokens().shape, bool)}
    assert not any(EIGHT_BITS & set(pair) for pair in step_operands(small.model, small.params, batch, None, "float32"))
    assert flatten(copies({"tokens": {"embedding": jnp.ones((2, 2))}}, "fp8")) == {}


@pytest.mark.parametrize(("path", "expected"), [
    ("blocks/mlp/up/kernel", True), ("blocks/moe/experts/up/kernel", True), ("blocks/moe/router/kernel", False),
    ("blocks/mlp/up/bias", False), ("unembed/embedding", False), ("senses/mlp/up/kernel", False),
])  # fmt: skip
def test_matrices_of_blocks_have_copies(path, expected):
    assert has_copy(path.split("/")) is expected


def test_gradients_are_those_of_the_unrounded_model_within_the_rounding():
    """Those of a larger model on text: tools/bench/gradients.py."""
    model = families.dense_model()
    values = quick.random_params(model, 0.1)
    exact_loss, exact = quick.loss_and_gradients(model, values, families.BATCH)
    for products, most in (("fp8", 0.15), ("int8", 0.08)):
        loss, found = quick.loss_and_gradients(model, values, families.BATCH, products=products)
        assert 0 < abs(loss - exact_loss) < 0.01 * exact_loss
        for (path, expected), gradient in zip(
            jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(found), strict=True
        ):
            error = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
            assert 0 < error < most, (products, path)


@pytest.mark.parametrize("storage", FORMATS)
def test_stored_parameters_have_a_scale_for_each_layer_and_are_used_as_copies(storage):
    small = make("mistral")
    kept = stored(small.params, storage, parameter_axes(small.model))
    without, scales = take_stored(kept)
    assert flatten(without).keys() == flatten(small.params).keys()
    layers = small.config.num_layers
    assert {leaf.shape[0] for leaf in jax.tree.leaves(scales)} == {layers}
    for one, other in zip(
        jax.tree.leaves(copies(kept, storage)), jax.tree.leaves(copies(small.params, storage)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def as_numbers(params, storage, axes):
    """Plain parameters, with the matrices that are stored in few bits as the numbers that these are."""
    without, arrays = take_stored(stored(params, storage, axes))
    flat, of_stored = dict(flatten(without)), flatten(arrays)
    for path, kernel in flatten(params).items():
        if not has_copy(path.split("/"), experts=False):
            continue
        layer = path.rpartition("/")[0]
        stacks = [of_stored.get(f"{layer}/{name}") for name in (storage, *ARRAYS)]
        flat[path] = jnp.stack(
            [
                Quantized(flat[path][number], stacks[1][number]).numbers(jnp.float32)
                if storage in FORMATS
                else Blocks(*(array[number] for array in stacks), storage, kernel.shape[1:]).numbers(jnp.float32)
                for number in range(len(kernel))
            ]
        )
    return without, arrays, unflatten(flat)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("storage", ["fp8", "nf4", "int4"])
def test_a_stored_layer_computes_with_its_numbers(family, storage):
    """Logits and the gradients of what is not stored are those of a model that has these numbers as parameters."""
    small = make(family)
    without, arrays, plain = as_numbers(small.params, storage, parameter_axes(small.model))
    trained = [path for path in flatten(plain) if not path.endswith("kernel")]

    def gradients(params, quantized):
        own, rest = (
            {path: leaf for path, leaf in flatten(params).items() if (path in trained) == wanted}
            for wanted in (True, False)
        )

        def loss(own):
            variables = {"params": unflatten(own | rest)} | ({QUANTIZED: quantized} if quantized else {})
            logits = small.model.apply(variables, tokens())
            return jnp.sin(logits).sum(), logits

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(own)

    (_, logits), found = gradients(without, arrays)
    (_, expected), exact = gradients(plain, {})
    np.testing.assert_allclose(logits, expected, atol=2e-6 * np.abs(expected).max())
    for path, gradient in exact.items():
        assert np.abs(found[path] - gradient).max() < 1e-5 * max(np.abs(gradient).max(), 1e-3), path


def test_what_storage_rounds():
    """Relative errors of logits and of adapters' gradients, of a Llama with random weights: figures of the guide."""
    sizes = {"hidden_dim": 256, "intermediate_dim": 512, "num_heads": 4, "num_layers": 4, "seq_len": 64}
    program = build_program(
        RunConfig(model={"type": "llama", **sizes}, lora={"r": 4, "base_dtype": "float32"}, initialize_from_hf="new"),
        128,
        jax.devices()[:1],
    )
    model, params = program.model, program.init().with_base(program.init().params)
    adapters = jax.tree.map(lambda leaf: leaf + 0.01, params["adapters"])  # B starts with zeros
    batch = np.random.default_rng(0).integers(0, 128, (4, 64))

    def results(base):
        def loss(adapters):
            logits = model.apply({"params": {"base": base, "adapters": adapters}}, batch)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0]), logits

        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapters)
        return np.asarray(logits).ravel(), np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)])

    exact, most = results(params["base"]), {"int8": 0.03, "fp8": 0.09, "nf4": 0.28, "int4": 0.35}
    errors = {}
    for storage in most:
        found = results(stored(params["base"], storage, parameter_axes(model.inner)))
        errors[storage] = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, exact, strict=True)]
        print(storage, *(f"{100 * error:.1f} %" for error in errors[storage]))
        assert max(errors[storage]) < most[storage], storage
    assert errors["nf4"][0] < errors["int4"][0]
