"""Gated DeltaNet layers: those of transformers, packed documents, generation, and the settings of a hybrid model."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick
from models.families import hybrid_model
from pydantic import ValidationError

from lmtrain.models.gated_delta.layer import GatedDelta
from lmtrain.models.interface import NO_DOCUMENTS, Documents
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.relatives import relative_of
from lmtrain.models.params import cast, cast_to_compute, copies
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError

LENGTH = 12
RNG = np.random.default_rng(0)


def test_a_layer_is_that_of_transformers():
    import torch
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    model = hybrid_model()
    config = model.config.of_kind(model.config.pattern[0])
    own = config.linear_attention
    sizes = {"num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"}
    theirs = Qwen3_5TextConfig(
        hidden_size=config.hidden_dim, rms_norm_eps=config.layer_norm_epsilon, num_hidden_layers=1,
        **{f"linear_{name}": getattr(own, name) for name in sizes},
    )  # fmt: skip
    layer = Qwen3_5GatedDeltaNet(theirs, 0)
    x = RNG.normal(size=(2, 300, config.hidden_dim)).astype(np.float32)
    ours = GatedDelta(config)
    params = quick.random_like(jax.eval_shape(ours.init, jax.random.key(0), x, 0, True, NO_DOCUMENTS), 0.4)

    def matrix(name):
        return params[name]["kernel"].reshape(config.hidden_dim, -1).T

    channels = [params[f"conv_{name}"].reshape(own.conv_kernel_dim, -1) for name in "qkv"]
    values = {
        "in_proj_qkv.weight": np.concatenate([matrix(name) for name in "qkv"]),
        "in_proj_z.weight": matrix("z"),
        "in_proj_b.weight": matrix("b"),
        "in_proj_a.weight": matrix("a"),
        "conv1d.weight": np.concatenate(channels, axis=1).T[:, None],
        "A_log": params["a_log"],
        "dt_bias": params["dt_bias"],
        "norm.weight": params["norm_out"]["scale"],
        "out_proj.weight": params["out"]["kernel"].reshape(-1, config.hidden_dim).T,
    }
    layer.load_state_dict({name: torch.tensor(np.array(value)) for name, value in values.items()})
    with torch.no_grad():
        expected = layer(torch.tensor(x)).numpy()
    found = jax.jit(lambda p: ours.apply({"params": p}, x, 0, True, NO_DOCUMENTS))(params)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("positions", [True, False], ids=["positions of documents", "positions of the sequence"])
def test_packed_documents_are_computed_as_each_alone(positions):
    model = hybrid_model()
    params = quick.random_params(model)
    tokens = RNG.integers(0, 13, (1, LENGTH))
    bounds = [0, 1, 4, 5, 12]
    segments = np.repeat(np.arange(4), np.diff(bounds))[None]
    within = np.concatenate([np.arange(size) for size in np.diff(bounds)])[None]
    if not positions and model.config.kinds[-1].rope:  # attention depends on differences of positions only
        within = None
    documents = Documents(jnp.asarray(segments), None if within is None else jnp.asarray(within))
    run = jax.jit(lambda t, d: model.apply({"params": params}, t, True, d, method="hidden"))
    found = run(tokens, documents)
    for begin, end in itertools.pairwise(bounds):
        np.testing.assert_allclose(found[:, begin:end], run(tokens[:, begin:end], NO_DOCUMENTS), atol=2e-5)


def test_generation_in_parts_with_rows_of_different_lengths_equals_the_whole():
    """Prompts with padding, whose last token comes again, as `decode` reads them; then token by token."""
    model = hybrid_model()
    params = {"params": quick.random_params(model)}
    tokens = RNG.integers(0, 13, (3, LENGTH))
    expected = jax.jit(lambda t: model.apply(params, t))(tokens)
    lengths = np.array([7, 1, 4])
    cache = model.apply(params, 3, LENGTH, method="empty_cache")
    extend = jax.jit(lambda t, c, start, count: model.apply(params, t, c, start, count, method="extend"))
    first, cache = extend(tokens[:, :8], cache, 0, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(first[row, :length], expected[row, :length], atol=2e-5)
    at = lengths - 1
    for _ in range(4):
        more, cache = extend(tokens[np.arange(3), at][:, None], cache, at, None)
        np.testing.assert_allclose(more[:, 0], expected[np.arange(3), at], atol=2e-5)
        at = at + 1
    # several at once, but not for a row that is finished
    part = np.stack([row[begin : begin + 2] for row, begin in zip(tokens, at, strict=True)])
    more, cache = extend(part, cache, at, np.array([1, 2, 0]))
    np.testing.assert_allclose(more[1], expected[1, at[1] : at[1] + 2], atol=2e-5)
    at += np.array([1, 2, 0])
    more, cache = extend(tokens[np.arange(3), at][:, None], cache, at, None)
    np.testing.assert_allclose(more[:, 0], expected[np.arange(3), at], atol=2e-5)


def test_decays_are_never_rounded():
    params = quick.random_params(hybrid_model())
    for rounded in (cast(params, "bfloat16"), cast_to_compute(params, "bfloat16")):
        delta = rounded["blocks"]["delta"]
        assert {delta["a_log"].dtype, delta["dt_bias"].dtype} == {jnp.dtype("float32")}
        assert delta["q"]["kernel"].dtype == jnp.bfloat16


def test_gates_have_no_8_bit_copy():
    copied = copies(quick.random_params(hybrid_model()), "fp8")["blocks"]["delta"]
    assert set(copied) == {"q", "k", "v", "z", "out"}


SIZES = {"num_heads": 4, "num_layers": 4, "hidden_dim": 16}
LINEAR = {"layer_pattern": ["linear", "full"], "linear_attention": {"num_key_heads": 2, "num_value_heads": 4}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"layer_pattern": ["linear", "full"]}, "linear_attention"),
        ({"linear_attention": {}}, "linear_attention"),
        (LINEAR | {"linear_attention": {"num_key_heads": 3, "num_value_heads": 4}}, "num_key_heads"),
        (LINEAR | {"layer_pattern": [{"attention": "linear", "rope": False}]}, "rope"),
        (LINEAR | {"layer_pattern": ["linear"], "attention_sinks": True}, "has attention"),
        (LINEAR | {"layer_pattern": ["linear"], "attention_logit_cap": 5.0}, "has attention"),
    ],
)
def test_settings_that_do_not_fit_are_errors(settings, named):
    with pytest.raises(ValidationError, match=named):
        LlamaConfig(**SIZES, **settings)


def test_what_linear_layers_lack_is_refused():
    transfer = {"base": {"hidden_dim": 8, "num_layers": 2, "num_heads": 2}}
    with pytest.raises(ValidationError, match="linear"):
        RunConfig(model={"type": "llama", **SIZES, **LINEAR}, transfer=transfer)
    with pytest.raises(ValidationError, match="sophia-g"):
        RunConfig(model={"type": "llama", **SIZES, **LINEAR}, optimizer={"type": "sophia-h"})
    with pytest.raises(UserError, match="qk_norm"):
        relative_of(LlamaConfig(**SIZES, **LINEAR))
