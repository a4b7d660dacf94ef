"""New parameters: in their dtypes, and with LoRA on a base that is new or exists already."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from lora.exported import config_of

from lmtrain.lora.model import ADAPTERS, BASE, adapt
from lmtrain.models.params import abstract_params, initializer, with_dtype
from lmtrain.models.registry import build_model
from lmtrain.weights.load_checkpoint import new_params

CONFIG = config_of("llama", {"num_layers": 1}, {"modules_to_save": ["lm_head"]})
INNER = build_model(CONFIG.model, 20)
KEY = jax.random.key(1)


def shapes(model, dtype):
    return with_dtype(meta.unbox(abstract_params(model)), dtype)


def test_parameters_are_those_of_the_initializer_rounded_to_their_dtype():
    params, frozen = new_params(INNER, KEY, shapes(INNER, "bfloat16"))
    assert frozen is None
    expected = meta.unbox(initializer(INNER)(KEY))
    jax.tree.map(lambda found, exact: np.testing.assert_array_equal(found, exact.astype("bfloat16")), params, expected)


@pytest.mark.parametrize("exists", [True, False])
def test_adapters_start_from_the_base_which_is_new_or_exists_already(exists):
    model = adapt(CONFIG.lora, CONFIG.model, INNER)
    abstract = shapes(model, "float32")
    base = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0), abstract[BASE]) if exists else None
    of_base = with_dtype(abstract[BASE], "bfloat16")
    adapters, frozen = new_params(model, KEY, abstract[ADAPTERS], of_base, base)
    assert adapters["blocks"]["attn"]["q"]["lora_a"].any()
    assert not adapters["blocks"]["attn"]["q"]["lora_b"].any()
    if exists:
        assert frozen is None
        assert (adapters["unembed"]["embedding"] == 2).all()
    else:
        assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"}
        table = adapters["unembed"]["embedding"]
        np.testing.assert_array_equal(table.astype("bfloat16"), frozen["unembed"]["embedding"])
