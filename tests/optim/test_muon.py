"""Muon compared with numpy, and which parameters of each model family it orthogonalizes."""

import functools

import jax
import numpy as np
import pytest
from flax.core.meta import unbox
from optax.contrib import MuonDimensionNumbers
from optim.test_optimizer import plain_adamw, steps

from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.models.params import abstract_params, parameter_axes
from lmtrain.models.registry import build_model
from lmtrain.optim.config import MuonConfig
from lmtrain.optim.muon import matrix_dims
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.sharding.axes import Axes

SIZES = {"hidden_dim": 8, "num_heads": 2, "num_layers": 2, "seq_len": 8}
EVERY_BIAS = {"use_bias": True, "use_mlp_bias": True, "qk_norm": "all", "attention_sinks": True}
CONFIGS = {
    "gpt2 with a head": Gpt2Config(**SIZES, tie_word_embeddings=False),
    "llama with all options": LlamaConfig(**SIZES, **EVERY_BIAS, intermediate_dim=12, norm_position="post"),
    "llama with norms of heads": LlamaConfig(**SIZES, intermediate_dim=12, qk_norm="head", use_qkv_bias=True),
    "latent": LlamaConfig(**SIZES, intermediate_dim=12, latent_attention={"q_lora_rank": 6}, mtp={}),
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
    **dict.fromkeys(("q_a", "kv_a"), (["embed"], ["to_latent"])),
    **dict.fromkeys(("q_b", "kv_b"), (["latent"], ["heads", "head_dim"])),
    "project": (["joined"], ["embed"]),
}
NUMBERS = {"gpt2": 4, "llama": 7, "latent": 17, "mpt": 4, "backpack": 9}


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


# Two layers of two heads.
BLOCK_AXES = {
    "tokens": {"embedding": Axes(("vocab", "embed"))},
    "blocks": {
        "qkv": {
            "kernel": Axes(("layers", "embed", "qkv", "heads", "head_dim"), 3),
            "bias": Axes(("layers", "qkv", "heads", "head_dim")),
        },
        "out": {"kernel": Axes(("layers", "heads", "head_dim", "embed"), 1)},
        "up": {"kernel": Axes(("layers", "embed", "mlp"), 1)},
        "down": {"kernel": Axes(("layers", "mlp", "embed"), 1), "bias": Axes(("layers", "embed"))},
        "norm": {"scale": Axes(("layers", "embed"))},
    },
}
SIZE = {"vocab": 11, "embed": 8, "layers": 2, "qkv": 3, "heads": 2, "head_dim": 4, "mlp": 12}
NAMES = ("qkv", "out", "up", "down")
WIDTHS = {"qkv": (8, 8), "out": (8, 8), "up": (8, 12), "down": (12, 8)}  # inputs, outputs


def random_blocks(seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda names: rng.normal(size=[SIZE[name] for name in names]).astype(np.float32),
        BLOCK_AXES,
        is_leaf=lambda names: isinstance(names, tuple),
    )


BLOCKS, BLOCK_GRADIENTS = random_blocks(0), [random_blocks(1), random_blocks(2)]


def as_matrices(name: str, leaf):
    """[number of matrices, inputs, outputs]"""
    leaf = np.asarray(leaf, np.float64)
    if name == "qkv":
        leaf = leaf.transpose(0, 2, 1, 3, 4)
    return leaf.reshape(-1, *WIDTHS[name])


def newton_schulz(x, iterations: int, coefficients=(3.4445, -4.7750, 2.0315)):
    """Jordan et al. 2024, in float64."""
    a, b, c = coefficients
    x = x / np.linalg.norm(x)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@functools.cache
def muon_updates(**settings):
    """Two updates of Muon with a learning rate of 0.5."""
    config = MuonConfig(**{"max_grad_norm": None, **settings})
    return steps(config, BLOCK_GRADIENTS, (0.5, 0.5), BLOCKS, BLOCK_AXES)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False, "momentum": 0.5, "backend_steps": 2},
        {"coefficients": (2, -1.5, 0.5), "backend_steps": 12},
    ],
    ids=str,
)
def test_muon_orthogonalizes_the_momentum_by_newton_schulz(settings):
    config = MuonConfig(**settings)
    beta = config.momentum
    for name in NAMES:
        inputs, outputs = WIDTHS[name]
        momentum = 0.0
        for gradient, update in zip(BLOCK_GRADIENTS, muon_updates(**settings), strict=True):
            gradient = as_matrices(name, gradient["blocks"][name]["kernel"])
            momentum = beta * momentum + (1 - beta) * gradient
            ahead = beta * momentum + (1 - beta) * gradient if config.nesterov else momentum
            matrices = [newton_schulz(x, config.backend_steps, config.coefficients) for x in ahead]
            expected = [-0.5 * max(1, outputs / inputs) ** 0.5 * x for x in matrices]
            np.testing.assert_allclose(
                as_matrices(name, update["blocks"][name]["kernel"]), expected, rtol=1e-3, atol=1e-4
            )


def test_other_parameters_are_updated_by_adam_with_adam_lr():
    """The schedule is the same as for matrices; at its peak, Adam's rate is adam_lr."""
    peak, adam_lr = 0.02, 6e-4
    config = MuonConfig(beta1=0.8, beta2=0.9, epsilon=1e-3, max_grad_norm=None, learning_rate=peak, adam_lr=adam_lr)
    updates, _ = steps(config, BLOCK_GRADIENTS, (peak, peak / 4), BLOCKS, BLOCK_AXES)
    for path in (("tokens", "embedding"), ("blocks", "norm", "scale"), ("blocks", "qkv", "bias")):
        leaves = []
        for tree in (*BLOCK_GRADIENTS, *updates):
            for key in path:
                tree = tree[key]
            leaves.append(np.asarray(tree, np.float64))
        expected = plain_adamw(np.zeros_like(leaves[0]), leaves[:2], [adam_lr, adam_lr / 4], 0.8, 0.9, 1e-3, 0.0)
        np.testing.assert_allclose(leaves[2] + leaves[3], expected, rtol=1e-4, atol=1e-9)


def test_parameters_of_adam_decay_by_its_rate():
    """In both groups, a parameter decays by its own learning rate times `weight_decay`."""
    settings = {"max_grad_norm": None, "learning_rate": 0.02, "adam_lr": 6e-4, "default_weight_decay_mask": False}
    found = []
    for weight_decay in (0.0, 0.3):
        config = MuonConfig(weight_decay=weight_decay, **settings)
        found.append(steps(config, BLOCK_GRADIENTS[:1], (0.02,), BLOCKS, BLOCK_AXES)[0][0])
    more = jax.tree.map(lambda a, b: b - a, *found)
    rates = jax.tree.map(lambda _: 6e-4, BLOCKS)
    for name in NAMES:
        rates["blocks"][name]["kernel"] = 0.02
    jax.tree.map(lambda d, p, rate: np.testing.assert_allclose(d, -rate * 0.3 * p, rtol=2e-3, atol=2e-6),
                 more, BLOCKS, rates)  # fmt: skip


def test_kimi_scaling_changes_only_the_size_of_matrix_updates():
    plain, scaled = muon_updates()[1], muon_updates(use_kimi_scaling=True)[1]
    for name in NAMES:
        inputs, outputs = WIDTHS[name]
        factor = 0.2 * max(inputs, outputs) ** 0.5 / max(1, outputs / inputs) ** 0.5
        np.testing.assert_allclose(
            scaled["blocks"][name]["kernel"], factor * plain["blocks"][name]["kernel"], rtol=1e-5, atol=1e-7
        )
    np.testing.assert_array_equal(scaled["tokens"]["embedding"], plain["tokens"]["embedding"])
    np.testing.assert_array_equal(scaled["blocks"]["norm"]["scale"], plain["blocks"]["norm"]["scale"])


@pytest.mark.parametrize("name", ["llama with all options", "backpack"])
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
