"""Parameters of a run: restored alone, in the dtype they were saved in (with averaging, their average in float32),
new, or those of the frozen base of adapters."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import meta
from lora.exported import Exported, config_of
from models.quick import TwoTokenLM
from safetensors.numpy import save_file

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.checkpoint.discovery import find_checkpoints
from lmtrain.lora.model import ADAPTERS, BASE, adapt
from lmtrain.models.params import abstract_params, flatten, initializer, with_dtype
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.load_checkpoint import new_params, restore_params
from lmtrain.weights.lora_base import base_dtype, load_base

MODEL = TwoTokenLM(8, 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("averaging", [None, {"beta": 0.9}])
def test_parameters_are_restored_alone_in_their_saved_dtype(tmp_path, dtype, averaging):
    rng = np.random.default_rng(0)
    shapes = meta.unbox(abstract_params(MODEL))
    params, average = (
        jax.tree.map(lambda leaf, kind=kind: jnp.asarray(rng.normal(size=leaf.shape), kind), shapes)
        for kind in (dtype, "float32")
    )
    checkpointer = Checkpointer(str(tmp_path), CheckpointerConfig())
    info = {"config": {"trainer": {"mp": f"p={dtype},c=float32", "model_averaging": averaging}}}
    checkpointer.save(7, Kind.PERMANENT, {"params": params, "average": average}, info)
    checkpointer.close()
    restored = restore_params(find_checkpoints(str(tmp_path))[-1], MODEL, build_layout(PartitioningConfig()))
    for leaf, expected in zip(
        jax.tree.leaves(restored), jax.tree.leaves(average if averaging else params), strict=True
    ):
        assert leaf.dtype == expected.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()


ONE, HALF = np.ones(2, np.float32), np.ones(2, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("values", "tensors", "expected"),
    [
        ({"dtype": "float16"}, {"a": ONE}, "float16"),
        ({"torch_dtype": "bfloat16"}, {"a": ONE}, "bfloat16"),
        ({"dtype": "auto"}, {"a": HALF, "counts": np.ones(2, np.int32)}, "bfloat16"),
        ({}, {"a": HALF, "b": ONE}, "float32"),
    ],
)
def test_the_dtype_is_that_of_the_config_or_of_all_stored_weights(tmp_path, values, tensors, expected):
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    assert base_dtype(RunConfig(), str(tmp_path)) == expected


def test_a_base_has_its_dtype_and_a_changed_one_is_refused(tmp_path, caplog):
    exported = Exported(tmp_path, "gpt2", {}, {"base_dtype": "bfloat16"})
    arguments = exported.config, exported.model, exported.layout, str(tmp_path / "base"), exported.tokenizer.identity
    with caplog.at_level("INFO", log.name):
        base = load_base(*arguments)
    digest = base.identity.fingerprint
    assert base.params["norm_final"]["scale"].dtype.name == "bfloat16"
    assert base.run_info == {"initialize_from_hf": str(tmp_path / "base"), "fingerprint": digest}
    assert base.identity == (digest, "bfloat16")
    assert f"bfloat16, frozen; fingerprint {digest[:12]}" in caplog.text
    assert load_base(*arguments, saved=base.run_info).identity == base.identity
    with pytest.raises(UserError, match=rf"{digest[:12]}.* 0000"):
        load_base(*arguments, saved=base.run_info | {"fingerprint": "0" * 32})


def test_what_is_kept_of_a_base_is_asked_when_a_parameter_is_complete(tmp_path):
    exported = Exported(tmp_path, "llama", {}, {"base_dtype": "bfloat16"})
    arguments = exported.config, exported.model, exported.layout, str(tmp_path / "base"), exported.tokenizer.identity
    expected, complete = flatten(load_base(*arguments).params), {}

    def store(path, array):
        complete[path] = np.asarray(array)
        array.delete()
        return {f"{path}_size": jnp.int32(array.size)}

    base = load_base(*arguments, store=store)
    assert base.identity == load_base(*arguments).identity
    assert flatten(base.params) == {f"{path}_size": leaf.size for path, leaf in expected.items()}
    for path, leaf in expected.items():
        np.testing.assert_array_equal(complete[path], leaf, err_msg=path)


CONFIG = config_of("llama", {"num_layers": 1}, {"modules_to_save": ["lm_head"]})
INNER = build_model(CONFIG.model, 20)
KEY = jax.random.key(1)


def shapes(model, dtype):
    return with_dtype(meta.unbox(abstract_params(model)), dtype)


def test_parameters_are_those_of_the_initializer_rounded_to_their_dtype():
    params = new_params(INNER, KEY, shapes(INNER, "bfloat16"))
    expected = meta.unbox(initializer(INNER)(KEY))
    jax.tree.map(lambda found, exact: np.testing.assert_array_equal(found, exact.astype("bfloat16")), params, expected)


def test_adapters_start_from_the_base():
    model = adapt(CONFIG.lora, CONFIG.model, INNER)
    abstract = shapes(model, "float32")
    base = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0, "bfloat16"), abstract[BASE])
    adapters = new_params(model, KEY, abstract[ADAPTERS], base)
    assert adapters["blocks"]["attn"]["q"]["lora_a"].any()
    assert not adapters["blocks"]["attn"]["q"]["lora_b"].any()
    assert adapters["unembed"]["embedding"].dtype == "float32"
    assert (adapters["unembed"]["embedding"] == 2).all()
