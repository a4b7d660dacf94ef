"""Arrays on disk: exact bits, and loading of some of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lmtrain.checkpoint.arrays import ArrayWriter, load_arrays, load_some_arrays, stored_arrays, with_shardings

PARAMS = {
    "a": {"kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3)},
    # every value, including quiet and signalling NaNs
    "all of bfloat16": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "all of float16": np.arange(2**16, dtype=np.uint16).view(np.float16),
}
ODD = np.array([0x7F800000, 0xFF800000, 0x80000000, 1, 0x7FC00001, 0x7F800001, 0xFFC12345], np.uint32).view(np.float32)
OPTIMIZER = (np.int32(7), {"odd": ODD, "long": np.array([-1, 2**31 - 1], np.int32), "yes": np.array(True)})


@pytest.fixture
def write(tmp_path):
    """`write(parts)` saves trees of arrays; returns their path."""

    def save(parts):
        writer = ArrayWriter()
        writer.start(str(tmp_path / "saved"), jax.tree.map(jnp.asarray, parts))
        writer.wait()
        writer.close()
        return str(tmp_path / "saved")

    return save


def like(tree):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return with_shardings(jax.eval_shape(lambda: tree), jax.tree.map(lambda _: device, tree))


def test_loaded_arrays_are_bitwise_equal_to_the_saved_ones(write):
    parts = {"params": PARAMS, "optimizer": OPTIMIZER, "average": PARAMS["a"]}
    path = write(parts)
    for part, saved in parts.items():
        loaded = load_arrays(path, part, like(jax.tree.map(jnp.asarray, saved)))
        assert jax.tree.structure(loaded) == jax.tree.structure(saved)
        for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True):
            assert one.dtype == other.dtype
            assert np.asarray(one).tobytes() == other.tobytes()


def test_stored_arrays_and_loading_of_some_arrays(write):
    path = write({"params": PARAMS})
    shapes = {"a/kernel": (2, 3), "all of bfloat16": (65536,), "all of float16": (65536,)}
    found = stored_arrays(path, "params")
    assert {name: array.shape for name, array in found.items()} == shapes
    assert found["all of bfloat16"].dtype == jnp.bfloat16
    assert stored_arrays(path, "average") == {}
    fresh = {"a": {"kernel": jnp.zeros((2, 3)), "bias": jnp.ones(2)}}
    loaded = load_some_arrays(path, "params", like(fresh), fresh)
    np.testing.assert_array_equal(loaded["a"]["kernel"], PARAMS["a"]["kernel"])
    np.testing.assert_array_equal(loaded["a"]["bias"], 1)
    assert load_some_arrays(path, "average", like(fresh), fresh) is fresh
