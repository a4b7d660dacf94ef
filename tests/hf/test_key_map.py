"""The map between our parameters and a Hugging Face file is exact in both directions."""

import numpy as np
import pytest

from lmtrain.hf.key_map import Row, flatten, from_hf, to_hf, unflatten

TABLE = (
    Row("plain", "p"),
    Row("blocks/vector", "h.{layer}.v", rows=0),
    Row("blocks/qkv", "h.{layer}.qkv", rows=1),
    Row("blocks/out", "h.{layer}.out", rows=2, transpose=True),
    Row("blocks/same", "h.{layer}.same", transpose=True),
)


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"plain": (5, 2), "blocks/vector": (3, 2, 4), "blocks/qkv": (3, 6, 3, 2), "blocks/out": (3, 2, 4, 5)}
    shapes["blocks/same"] = (3, 4, 6)
    return unflatten({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def test_shapes_and_order_on_their_side(params):
    tensors = to_hf(TABLE, params)
    flat = flatten(params)
    assert len(tensors) == 1 + 4 * 3
    np.testing.assert_array_equal(tensors["h.1.v"], flat["blocks/vector"][1].ravel())
    np.testing.assert_array_equal(tensors["h.2.qkv"], flat["blocks/qkv"][2].reshape(6, 6))
    np.testing.assert_array_equal(tensors["h.0.out"], flat["blocks/out"][0].reshape(8, 5).T)
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())


def test_there_and_back_is_bit_exact(params):
    back = from_hf(TABLE, to_hf(TABLE, params), params, num_layers=3)
    for name, array in flatten(params).items():
        assert flatten(back)[name].tobytes() == array.tobytes(), name


def test_a_parameter_without_a_row_is_an_error(params):
    with pytest.raises(ValueError, match=r"unexpected \['extra'\]"):
        to_hf(TABLE, params | {"extra": np.zeros(1)})


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_tensors_that_do_not_match_are_an_error(params, change):
    tensors = to_hf(TABLE, params)
    if change == "missing":
        del tensors["h.1.qkv"]
    else:
        tensors["h.3.qkv"] = tensors["h.1.qkv"]
    with pytest.raises(ValueError, match=rf"{change} \['h\.[13]\.qkv'\]"):
        from_hf(TABLE, tensors, params, num_layers=3)
