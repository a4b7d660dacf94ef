"""Parameters of a model as a tree: names of dimensions, counts, paths, dtypes; computed without a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from parity.variants import SIZES, VARIANTS

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.params import (
    abstract_params,
    cast_to_compute,
    count_parameters,
    flatten,
    initializer,
    parameter_axes,
    shapes_by_path,
    with_dtype,
)
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig

MODEL = Gpt2LM(Gpt2Config(hidden_dim=8, num_heads=2, num_layers=2, seq_len=8), 12)


def test_abstract_parameters_carry_a_name_for_each_dimension():
    boxed = abstract_params(MODEL)
    assert all(
        len(box.names) == len(box.value.shape) for box in jax.tree.leaves(boxed, is_leaf=lambda x: hasattr(x, "names"))
    )
    assert nn.meta.unbox(boxed)["tokens"]["embedding"].shape == (128, 8)  # padded


def test_padding_of_the_vocabulary_is_not_counted_as_parameters():
    whole = sum(leaf.size for leaf in jax.tree.leaves(nn.meta.unbox(abstract_params(MODEL))))
    assert count_parameters(MODEL) == whole - (128 - 12) * 8


def test_paths_and_names_of_dimensions_are_those_of_the_tree():
    shapes = shapes_by_path(abstract_params(MODEL))
    assert shapes["blocks/attn/out/kernel"] == (2, 2, 4, 8)
    assert parameter_axes(MODEL)["blocks"]["attn"]["out"]["kernel"] == ("layers", "heads", "head_dim", "embed")


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3_moe"])
def test_for_a_computation_all_parameters_are_cast_but_those_of_norms_and_routers(name):
    _, family, changes = VARIANTS[name]
    config = RunConfig.model_validate({"model": {"type": family, **SIZES, **changes}})
    params = nn.meta.unbox(abstract_params(build_model(config.model, 12)))
    found = flatten(jax.eval_shape(lambda params: cast_to_compute(params, "bfloat16"), params))
    # norms are what has a scale
    kept = {path for path in found if f"{path.rpartition('/')[0]}/scale" in found or "router" in path}
    assert {path for path, leaf in found.items() if leaf.dtype == jnp.float32} == kept
    assert len(kept) >= 3
    half = with_dtype(params, "bfloat16")
    wide = jax.eval_shape(lambda params: cast_to_compute(params, "float32"), half)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {np.dtype(np.float32)}
    assert ("blocks/moe/router/kernel" in kept) == (name == "qwen3_moe")


def test_initial_values_need_no_device_that_a_kernel_needs():
    """They are computed from two tokens in float32, which the kernels refuse."""
    found, expected = (
        nn.meta.unbox(initializer(MODEL.clone(attention=name))(jax.random.key(0))) for name in ("splash", "xla")
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))
