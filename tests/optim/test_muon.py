"""Which parameters of each model family Muon orthogonalizes, with their input and output dimensions."""

import jax
import pytest
from flax.core.meta import unbox
from optax.contrib import MuonDimensionNumbers

from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.models.params import abstract_params, parameter_axes
from lmtrain.models.registry import build_model
from lmtrain.optim.config import MuonConfig
from lmtrain.optim.muon import matrix_dims
from lmtrain.optim.optimizer import build_optimizer

SIZES = {"hidden_dim": 8, "num_heads": 2, "num_layers": 2, "seq_len": 8}
EVERY_BIAS = {"use_bias": True, "use_mlp_bias": True, "qk_norm": "all"}
CONFIGS = {
    "gpt2": Gpt2Config(**SIZES),
    "gpt2 with a head": Gpt2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, intermediate_dim=12, num_kv_heads=1),
    "llama with all options": LlamaConfig(**SIZES, **EVERY_BIAS, intermediate_dim=12, norm_position="post"),
    "llama with norms of heads": LlamaConfig(**SIZES, intermediate_dim=12, qk_norm="head", use_qkv_bias=True),
    "mpt": MptConfig(**SIZES, use_bias=True, tie_word_embeddings=False),
    "backpack": BackpackConfig(**SIZES, num_senses=4),
}
# Names of the input and output dimensions of each matrix; the other dimensions stack matrices.
PROJECTION = (["embed"], ["heads", "head_dim"])
MATRICES = {
    "qkv": PROJECTION,
    "q": PROJECTION,
    "k": (["embed"], ["kv_heads", "head_dim"]),
    "v": (["embed"], ["kv_heads", "head_dim"]),
    "out": (["heads", "head_dim"], ["embed"]),
    "up": (["embed"], ["mlp"]),
    "gate": (["embed"], ["mlp"]),
    "down": (["mlp"], ["embed"]),
    "weigh": (["embed"], ["head_dim"]),
}
NUMBERS = {"gpt2": 4, "llama": 7, "mpt": 4, "backpack": 9}


def named(tree, is_leaf=None) -> dict:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_dimensions_of_all_matrices_of_layers_and_of_nothing_else(name):
    axes = named(parameter_axes(build_model(CONFIGS[name], 16)), lambda leaf: isinstance(leaf, tuple))
    matrices = []
    for path, names in axes.items():
        found = matrix_dims(names)
        *_, layer, kind = path.split("/")
        if kind != "kernel":  # embeddings, positions, heads, norms, biases
            assert found == (), path
            continue
        assert isinstance(found, MuonDimensionNumbers), path
        as_names = tuple([names[dim] for dim in dims] for dims in found)
        assert as_names == MATRICES[layer], path
        matrices.append(path)
    assert len(matrices) == NUMBERS[name.split()[0]]
    assert len(axes) > len(matrices)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("vocab", "embed"), ()),
        (("position", "embed"), ()),
        (("embed",), ()),
        (("layers", "embed"), ()),
        (("layers", "mlp"), ()),
        (("layers", "qkv", "heads", "head_dim"), ()),
        (("layers", "heads", "head_dim"), ()),
        (("senses", "embed"), ()),
        (("embed", "mlp"), MuonDimensionNumbers((0,), (1,))),
        (("layers", "mlp", "embed"), MuonDimensionNumbers((1,), (2,))),
        (("layers", "embed", "qkv", "heads", "head_dim"), MuonDimensionNumbers((1,), (3, 4))),
        (("layers", "heads", "head_dim", "embed"), MuonDimensionNumbers((1, 2), (3,))),
        (("mlp", "senses", "embed"), MuonDimensionNumbers((0,), (2,))),
        (("embed", "qkv", "senses", "head_dim"), MuonDimensionNumbers((0,), (3,))),
    ],
    ids=str,
)
def test_matrix_dims_of_logical_names(names, expected):
    assert matrix_dims(names) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_have_one_momentum_and_other_parameters_two_adam_moments(name):
    """Checks the size of the optimizer state, and that all parameters are updated."""
    model = build_model(CONFIGS[name], 16)
    optimizer = build_optimizer(MuonConfig(), lambda count: 0.1, parameter_axes(model))
    params = unbox(abstract_params(model))
    state = jax.eval_shape(optimizer.init, params)
    sizes = {path: leaf.size for path, leaf in named(params).items()}
    expected = sum(size * (1 if path.endswith("kernel") else 2) for path, size in sizes.items())
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1 or (leaf.ndim == 1 and leaf.shape != (3,))]
    assert sum(leaf.size for leaf in moments) == expected
    updates, _ = jax.eval_shape(optimizer.update, params, state, params)
    assert jax.tree.map(lambda leaf: leaf.shape, updates) == jax.tree.map(lambda leaf: leaf.shape, params)
