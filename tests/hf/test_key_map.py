"""The map between our parameters and a Hugging Face file is exact in both directions."""

import numpy as np
import pytest
from hf_tensors import to_hf

from lmtrain.hf.key_map import Row, Zeros, build_pieces, resize_vocab
from lmtrain.models.params import flatten, unflatten

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


def test_shapes_and_order_of_their_tensors_and_a_bit_exact_round_trip(params):
    tensors = to_hf(TABLE, params, num_layers=3, vocab_size=4)
    flat = flatten(params)
    assert len(tensors) == 1 + 4 * 3
    np.testing.assert_array_equal(tensors["h.1.v"], flat["blocks/vector"][1].ravel())
    np.testing.assert_array_equal(tensors["h.2.qkv"], flat["blocks/qkv"][2].reshape(6, 6))
    np.testing.assert_array_equal(tensors["h.0.out"], flat["blocks/out"][0].reshape(8, 5).T)
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())

    for row in TABLE:  # and back, bit for bit
        for layer in range(3) if row.is_stacked else [None]:
            ours = flat[row.ours] if layer is None else flat[row.ours][layer]
            theirs = tensors[row.theirs.format(layer=layer)]
            assert np.ascontiguousarray(row.to_ours(theirs, ours.shape)).tobytes() == ours.tobytes(), row


def test_planned_shapes_match_the_tensors_and_layers_are_contiguous(params):
    shapes = {path: array.shape for path, array in flatten(params).items()}
    pieces = build_pieces(TABLE, shapes, num_layers=3, vocab_size=4)
    tensors = to_hf(TABLE, params, num_layers=3, vocab_size=4)
    assert {piece.name: piece.shape for piece in pieces} == {name: tensor.shape for name, tensor in tensors.items()}
    assert [piece.index for piece in pieces] == [()] + [(0,)] * 4 + [(1,)] * 4 + [(2,)] * 4


JOINED = (
    Row("blocks/q", "h.{layer}.qz", rows=1, transpose=True, layers=(1, 2), groups=2),
    Row("blocks/z", "h.{layer}.qz", rows=1, transpose=True, layers=(1, 2), groups=2),
    Row("blocks/norm", "h.{layer}.first", named_in=(0,)),
    Row("blocks/norm", "h.{layer}.other", named_in=(1, 2)),
    Row("blocks/conv", "h.{layer}.conv", rows=1, transpose=True, layers=(1, 2), has_middle=True),
)


def test_several_parameters_are_one_tensor_by_groups_and_one_has_other_names_by_layer():
    rng = np.random.default_rng(0)
    sizes = {"q": (2, 5, 2, 3), "z": (2, 5, 4, 2), "norm": (3, 5), "conv": (2, 4, 2, 3)}
    flat = {f"blocks/{name}": rng.normal(size=shape).astype(np.float32) for name, shape in sizes.items()}
    tensors = to_hf(JOINED, unflatten(flat), num_layers=3, vocab_size=1)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "h.0.first": (5,),
        **{f"h.{n}.{name}": shape for n in (1, 2) for name, shape in
           {"qz": (14, 5), "other": (5,), "conv": (6, 1, 4)}.items()},
    }  # fmt: skip
    q, z = flat["blocks/q"][1], flat["blocks/z"][1]
    by_head = [np.concatenate([q[:, head].T, z[:, 2 * head : 2 * head + 2].reshape(5, -1).T]) for head in range(2)]
    np.testing.assert_array_equal(tensors["h.2.qz"], np.concatenate(by_head))
    np.testing.assert_array_equal(tensors["h.1.other"], flat["blocks/norm"][1])
    np.testing.assert_array_equal(tensors["h.1.conv"][:, 0], flat["blocks/conv"][0].reshape(4, 6).T)
    pieces = build_pieces(JOINED, {path: array.shape for path, array in flat.items()}, 3, 1)
    for piece in pieces:
        for number, row in enumerate(piece.rows):
            ours = flat[row.ours][piece.index[0]]
            back = row.to_ours(piece.part_of(number, tensors[piece.name]), ours.shape)
            assert np.ascontiguousarray(back).tobytes() == ours.tobytes(), row


def test_padding_of_the_vocabulary_is_not_exported_and_zeros_are_added_for_each_layer():
    table = [Row("e", "E", vocab=True), Row("p", "P")]
    params = {"e": np.arange(12, dtype=np.float32).reshape(6, 2), "p": np.zeros((6, 2))}
    tensors = to_hf(table, params, num_layers=0, vocab_size=4)
    np.testing.assert_array_equal(tensors["E"], params["e"][:4])
    assert tensors["P"].shape == (6, 2)
    tensors = to_hf([Row("a", "A"), Zeros("h.{layer}.b", (3,))], {"a": np.ones(2)}, num_layers=2, vocab_size=1)
    assert list(tensors) == ["A", "h.0.b", "h.1.b"]
    np.testing.assert_array_equal(tensors["h.1.b"], np.zeros(3))


def test_a_parameter_without_a_row_and_a_row_without_a_parameter_are_errors(params):
    with pytest.raises(ValueError, match="extra"):
        to_hf(TABLE, params | {"extra": np.zeros(1)}, num_layers=3, vocab_size=4)
    del params["plain"]
    with pytest.raises(ValueError, match="plain"):
        to_hf(TABLE, params, num_layers=3, vocab_size=4)


def test_a_vocabulary_is_truncated_filled_with_the_mean_and_padded_with_zeros():
    theirs = np.array([[1, 2], [3, 4], [5, 9]], np.float32)
    np.testing.assert_array_equal(resize_vocab(theirs, 2, 4), [[1, 2], [3, 4], [0, 0], [0, 0]])
    np.testing.assert_array_equal(resize_vocab(theirs, 3, 3), theirs)
    np.testing.assert_array_equal(resize_vocab(theirs, 5, 6), [*theirs, [3, 5], [3, 5], [0, 0]])
