"""Selection of decaying parameters: by a regular expression, by texts, by the default rule, or all."""

import re

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from lmtrain.optim.config import AdamConfig
from lmtrain.optim.transforms import decay_mask
from lmtrain.runtime.errors import UserError

PATHS = [
    "blocks/attn/qkv/bias",
    "blocks/attn/qkv/kernel",
    "blocks/mlp/up/bias",
    "blocks/mlp/up/kernel",
    "blocks/norm_mlp/scale",
    "norm_final/scale",
    "tokens/embedding",
]
KERNELS = {"blocks/attn/qkv/kernel", "blocks/mlp/up/kernel"}
MLP = {"blocks/mlp/up/bias", "blocks/mlp/up/kernel"}
SCALES = {"blocks/norm_mlp/scale", "norm_final/scale"}


def tree() -> dict:
    params: dict = {}
    for path in PATHS:
        *parents, name = path.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = np.zeros(2)
    return params


def decaying(modules, mask) -> set[str]:
    config = AdamConfig(weight_decay_modules=modules, default_weight_decay_mask=mask)
    found = decay_mask(config, tree())
    leaves = jax.tree_util.tree_leaves_with_path(found)
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): decays for path, decays in leaves}
    assert sorted(names) == PATHS
    assert {type(decays) for decays in names.values()} == {bool}
    return {path for path, decays in names.items() if decays}


@pytest.mark.parametrize(
    ("modules", "mask", "expected"),
    [
        # no modules: the default rule, unless it is false
        (None, None, KERNELS),
        (None, True, KERNELS),
        (None, False, set(PATHS)),
        # modules: only these, unless the default rule is true
        ("blocks/mlp", None, MLP),
        ("blocks/mlp", True, MLP | KERNELS),
        (["/mlp/"], None, MLP),
        (["/mlp/"], True, MLP | KERNELS),
        # a pattern is matched at the start of the path, not to its end
        ("blocks", None, {path for path in PATHS if path.startswith("blocks")}),
        (".*scale$", None, SCALES),
        ("(tokens|norm_final)/", None, {"tokens/embedding", "norm_final/scale"}),
        (r".*/(kernel|embedding)", True, KERNELS | {"tokens/embedding"}),
        # a text matches literally, anywhere in the path
        (["scale"], None, SCALES),
        (["mlp"], None, MLP | {"blocks/norm_mlp/scale"}),
        (["ernel"], False, KERNELS),
    ],
)
def test_the_decaying_parameters(modules, mask, expected):
    assert decaying(modules, mask) == expected


@pytest.mark.parametrize(
    ("modules", "unknown"),
    [
        ("mlp", "mlp"),  # not at the start
        (["blocks.mlp"], "blocks.mlp"),  # a text, not a pattern
        (["scale", "nrom"], "nrom"),
        (["Tokens"], "Tokens"),
    ],
)
@pytest.mark.parametrize("mask", [None, True, False])
def test_a_module_without_match_is_a_user_error_that_lists_the_paths(modules, unknown, mask):
    message = (
        f"optimizer.weight_decay_modules: {unknown!r} matches no parameter path; expected one of {', '.join(PATHS)}"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        decaying(modules, mask)


def test_an_invalid_regular_expression_is_refused_by_the_config():
    with pytest.raises(ValidationError, match="invalid regular expression"):
        AdamConfig(weight_decay_modules="(")
    assert AdamConfig(weight_decay_modules=["("]).weight_decay_modules == ["("]  # a text need not be one
