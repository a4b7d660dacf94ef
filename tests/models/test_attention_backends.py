"""The choice of an attention backend: never one that lacks a needed feature, and always with a reason."""

import itertools
import re

import jax
import numpy as np
import pytest

from lmtrain.config.errors import UserError
from lmtrain.models import attention_backends
from lmtrain.models.attention_backends import BACKENDS, FEATURES, choose_attention
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.layers.attention import self_attend
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import build_model

HOME = {name: backend.platform for name, backend in BACKENDS.items()}
CANNOT = {name: set(FEATURES) - backend.features for name, backend in BACKENDS.items()}
PLATFORMS = ["cpu", "gpu", "tpu"]
SHORT, LONG = 4095, 4096


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_explicit_backend_is_used_or_refused_with_the_name_of_the_missing_feature(backend, feature):
    platform = HOME[backend] or "cpu"
    if feature in CANNOT[backend]:
        with pytest.raises(UserError) as refused:
            choose_attention(backend, {feature}, platform, SHORT)
        message = str(refused.value)
        assert message.startswith(f"model.attn_backend: {backend} ")
        assert FEATURES[feature] in message
    else:
        assert choose_attention(backend, {feature}, platform, SHORT) == (backend, "explicitly set")


def test_exactly_the_missing_features_are_named():
    with pytest.raises(UserError) as refused:
        choose_attention("cudnn", ["window", "alibi", "segments"], "gpu", SHORT)
    message = str(refused.value)
    assert FEATURES["alibi"] in message
    assert FEATURES["segments"] in message
    assert FEATURES["window"] not in message


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_explicit_backend_for_another_device_is_refused_with_both_names(backend, platform):
    if HOME[backend] in (None, platform):
        assert choose_attention(backend, [], platform, SHORT)[0] == backend
    else:
        needed = f"{backend} requires a {HOME[backend].upper()}, got a {platform.upper()}"
        with pytest.raises(UserError, match=needed):
            choose_attention(backend, [], platform, SHORT)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("seq_len", [SHORT, LONG])
def test_auto_takes_the_first_supported_backend_and_gives_reasons_against_earlier_ones(platform, seq_len):
    """For all sets of features."""
    preferred = [name for name in ("cudnn", "triton", "splash") if HOME[name] == platform]
    preferred += ["blockwise"] if seq_len == LONG else []
    for size in range(len(FEATURES) + 1):
        for needs in itertools.combinations(FEATURES, size):
            name, reason = choose_attention("auto", needs, platform, seq_len)
            able = [other for other in [*preferred, "xla"] if not CANNOT[other] & set(needs)]
            assert name == able[0], needs
            passed = preferred[: preferred.index(name)] if name in preferred else preferred
            if not passed:
                assert reason == "fastest on this device"
                continue
            for other, part in zip(passed, reason.split("; "), strict=True):
                missing = [FEATURES[need] for need in needs if need in CANNOT[other]]
                assert part.startswith(f"{other} does not support ")
                assert all(words in part for words in missing), (needs, part)


@pytest.mark.parametrize(
    ("platform", "seq_len", "needs", "name"),
    [
        ("cpu", SHORT, [], "xla"),
        ("cpu", LONG, [], "blockwise"),
        ("cpu", LONG, ["dropout"], "xla"),
        ("gpu", SHORT, [], "cudnn"),
        ("gpu", LONG, ["window"], "cudnn"),
        ("gpu", SHORT, ["segments"], "triton"),
        ("gpu", LONG, ["segments", "window", "alibi"], "triton"),
        ("gpu", SHORT, ["segments", "dropout"], "xla"),
        ("gpu", LONG, ["float32"], "blockwise"),
        ("tpu", SHORT, ["segments", "window"], "splash"),
        ("tpu", LONG, ["alibi"], "blockwise"),
        ("tpu", SHORT, ["odd_length"], "xla"),
    ],
)
def test_choices_of_auto(platform, seq_len, needs, name):
    assert choose_attention("auto", needs, platform, seq_len)[0] == name


def test_the_table_in_the_docstring_is_correct():
    rows: dict[str, str] = {}
    for line in attention_backends.__doc__.splitlines():
        if match := re.match(r"(\w+) {2,}(any|GPU|TPU) {2,}(.*?) {2,}grows", line):
            name, device, text = match.groups()
            assert HOME[name] == (None if device == "any" else device.lower())
            rows[name] = text
        elif line.startswith(" " * 19) and rows:
            rows[name] += f" {line.strip()}"
    assert set(rows) == set(BACKENDS)


@pytest.mark.parametrize("feature", ["dropout", "alibi", "upcast", "segments"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_does_not_silently_ignore_an_unsupported_feature(backend, feature):
    """A check for the case that the choice is wrong, or was not made."""
    if feature not in CANNOT[backend]:
        return
    q = jax.ShapeDtypeStruct((1, 2, 128, 8), np.float32)
    segments = np.zeros((1, 128), np.int32)
    wish = {
        "dropout": {"drop": lambda weights: weights},
        "alibi": {"slopes": np.ones(2, np.float32)},
        "upcast": {"upcast": True},
        "segments": {"segments_BS": segments},
    }[feature]
    with pytest.raises(AssertionError, match=f"{backend} attention has no"):
        jax.eval_shape(lambda q: self_attend(backend, q, q, q, 1.0, **wish), q)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (Gpt2Config(), set()),
        (Gpt2Config(seq_len=1000), {"odd_length"}),
        (Gpt2Config(attn_pdrop=0.1), {"dropout"}),
        (Gpt2Config(resid_pdrop=0.1, embed_pdrop=0.1), set()),
        (Gpt2Config(upcast_attn=True), {"upcast"}),
        (Gpt2Config(num_heads=4), {"wide_heads"}),
        (Gpt2Config(num_heads=6), set()),  # 128 wide
        (Gpt2Config(num_heads=64), {"odd_heads"}),
        (Gpt2Config(hidden_dim=780, num_heads=6, attn_pdrop=0.1), {"wide_heads", "odd_heads", "dropout"}),
        (LlamaConfig(), set()),
        (LlamaConfig(sliding_window=100), {"window"}),
        (LlamaConfig(head_dim=256, seq_len=100), {"wide_heads", "odd_length"}),
        (LlamaConfig(head_dim=12, num_kv_heads=4), {"odd_heads"}),
        (MptConfig(), {"alibi"}),
        (MptConfig(attn_pdrop=0.1, seq_len=100), {"alibi", "dropout", "odd_length"}),
        (MptConfig(resid_pdrop=0.1, embed_pdrop=0.1, num_heads=64), {"alibi", "odd_heads"}),
        (BackpackConfig(), {"wide_values"}),
        (
            BackpackConfig(attn_pdrop=0.1, upcast_attn=True, seq_len=64),
            {"wide_values", "dropout", "upcast", "odd_length"},
        ),
    ],
)
def test_every_family_reports_the_needs_of_its_attention(config, needs):
    assert config.attention_needs == needs
    assert needs <= set(FEATURES)


@pytest.mark.parametrize("backend", ["cudnn", "triton", "splash"])
def test_fresh_parameters_need_no_device_that_attention_needs(backend):
    """Initial values are computed from two tokens in float32, which the kernels refuse."""
    config = Gpt2Config(hidden_dim=32, num_heads=4, num_layers=2, seq_len=128)
    found, expected = (abstract_params(build_model(config, 64, name)) for name in (backend, "xla"))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
