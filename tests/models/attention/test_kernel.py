"""The choice of an attention backend: never one that lacks a needed feature, and always with a reason."""

import ast
import importlib.util
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

import lmtrain
from lmtrain.models.attention.kernel import choose_attention, kernel_of, kernels, log_attention, self_attend
from lmtrain.models.attention.names import FEATURES, PLAIN, AttentionBackend, AttentionNeeds
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.moe.grouped import choose_grouped
from lmtrain.models.mpt.config import MptConfig
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError

KERNELS = {kernel.name: kernel for kernel in kernels()}
HOME = {name: kernel.platform for name, kernel in KERNELS.items()}
CANNOT = {name: set(FEATURES) - kernel.features for name, kernel in KERNELS.items()}
PLATFORMS = ["cpu", "gpu", "tpu"]
SHORT, LONG = 4095, 4096


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


REMOVED: set[str] = set()  # modules that a test hides


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """tokamax, and a JAX that it runs with, on every machine."""
    find = importlib.util.find_spec
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in REMOVED else find("jax" if name == "tokamax" else name)
    )
    yield
    REMOVED.clear()


def choose(backend, features=(), platform="cpu", seq_len=SHORT, block_size=None, kind=H100):
    return choose_attention(
        AttentionNeeds(backend=backend, features=frozenset(features), seq_len=seq_len, block_size=block_size),
        platform,
        kind,
    )


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", KERNELS)
def test_an_explicit_backend_is_used_or_refused_with_the_name_of_the_missing_feature(backend, feature):
    platform = HOME[backend] or "cpu"
    if feature in CANNOT[backend]:
        with pytest.raises(UserError) as refused:
            choose(backend, {feature} | KERNELS[backend].features, platform)
        assert str(refused.value).startswith(f"model.attn_backend: {backend} ")
        assert FEATURES[feature] in str(refused.value)
    else:
        assert choose(backend, {feature}, platform) == (backend, "explicitly set")


def test_gpus_without_a_compiler_of_kernels_have_plain_attention_with_the_reason():
    choice = choose("auto", platform="gpu", seq_len=LONG, kind="Tesla T4")
    assert (HOME[choice.name], "8.0" in choice.reason) == (None, True)
    with pytest.raises(UserError, match=r"8\.0"):
        choose("triton", platform="gpu", kind="Tesla T4")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("backend", KERNELS)
def test_an_explicit_backend_for_another_device_is_refused_with_both_names(backend, platform):
    if HOME[backend] in (None, platform):
        assert choose(backend, [], platform)[0] == backend
    else:
        with pytest.raises(UserError, match=f"{backend} .* {HOME[backend].upper()}, .* {platform.upper()}"):
            choose(backend, [], platform)


@pytest.mark.parametrize(
    ("platform", "seq_len", "needs", "name"),
    [
        ("cpu", SHORT, [], "xla"),
        ("cpu", LONG, ["dropout"], "xla"),
        ("gpu", LONG, ["window"], "cudnn"),
        ("gpu", LONG, ["segments", "window", "alibi"], "triton"),
        ("gpu", SHORT, ["segments", "dropout"], "xla"),
        ("gpu", LONG, ["float32"], "blockwise"),
        ("tpu", SHORT, ["segments", "window"], "splash"),
        ("tpu", LONG, ["alibi"], "blockwise"),
        ("tpu", SHORT, ["dropout"], "xla"),
    ],
)
def test_choices_of_auto(platform, seq_len, needs, name):
    assert choose("auto", needs, platform, seq_len)[0] == name


def test_a_backend_that_jax_has_removed_is_replaced_by_the_next_one_with_the_reason():
    REMOVED.add("jax.experimental.pallas.triton")
    assert jax.__version__ in choose("auto", ["segments"], "gpu", LONG).reason
    with pytest.raises(UserError, match=r"model\.attn_backend: triton"):
        choose("triton", ["segments"], "gpu")
    assert A100 in choose("auto", ["segments"], "gpu", LONG, kind=A100).reason
    REMOVED.update(["jax._src.cudnn.fused_attention_stablehlo", "tokamax"])
    assert choose("auto", ["segments"], "gpu", LONG).name == "blockwise"
    choice = choose("auto", ["cap"], "gpu", LONG)
    assert (choice.name, "pip install tokamax" in choice.reason) == ("blockwise", True)


def test_tokamax_needs_jax_0_11_1(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    with pytest.raises(UserError, match=r"tokamax .*0\.11\.1"):
        choose("tokamax", [], "gpu")


def test_auto_gives_the_reasons_against_earlier_backends():
    found = choose("auto", ["segments", "dropout"], "gpu", LONG).reason.split("; ")
    assert [reason.split()[0] for reason in found] == ["cudnn", "triton", "cudnn_packed", "tokamax", "blockwise"]
    assert all(FEATURES["dropout"] in reason for reason in found)


@pytest.mark.parametrize(
    ("platform", "features", "name"),
    [
        ("cpu", [], "blockwise"),
        ("gpu", [], "blockwise"),
        ("tpu", [], "splash"),
        ("tpu", ["alibi"], "blockwise"),
        ("gpu", ["dropout"], "xla"),
    ],
)
def test_auto_prefers_a_kernel_that_uses_the_given_block_size_or_warns(caplog, platform, features, name):
    needs = AttentionNeeds(backend="auto", features=frozenset(features), seq_len=SHORT, block_size=64)
    choice = choose_attention(needs, platform, H100)
    assert choice.name == name
    log_attention(choice, needs, platform)
    warnings = [line for line in caplog.messages if line.startswith("model.flash_attention_block_size: ")]
    assert len(warnings) == (name == "xla")


@pytest.mark.parametrize("name", KERNELS)
def test_an_explicit_kernel_without_a_block_size_refuses_one(name):
    platform = HOME[name] or "cpu"
    if KERNELS[name].uses_block_size:
        assert choose(name, platform=platform, block_size=64).name == name
    else:
        with pytest.raises(UserError, match=rf"model\.flash_attention_block_size: .*model\.attn_backend {name} "):
            choose(name, platform=platform, block_size=64)


def test_dropout_does_not_restrict_the_kernel_of_evaluation_and_sampling():
    """They run without dropout, so a kernel that does not support it is allowed."""

    def choose(platform, trains=True, **model):
        values = {"model": {"type": "gpt2", "attn_pdrop": 0.1, **model}, "trainer": {"mp": "bf16"}}
        return choose_attention(RunConfig.model_validate(values).attention_needs(trains), platform, H100).name

    with pytest.raises(UserError, match="dropout on the attention weights"):
        choose("cpu", attn_backend="blockwise")
    assert choose("cpu", trains=False, attn_backend="blockwise") == "blockwise"
    assert choose("gpu") == "xla"
    assert choose("gpu", trains=False) == "triton"


@pytest.mark.parametrize("feature", ["dropout", "alibi", "sinks", "upcast", "segments"])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_backend_does_not_silently_ignore_an_unsupported_feature(backend, feature):
    """A check for the case that the choice is wrong, or was not made."""
    if feature not in CANNOT[backend]:
        return
    q = jax.ShapeDtypeStruct((1, 2, 128, 8), np.float32)
    segments = np.zeros((1, 128), np.int32)
    wish = {
        "dropout": {"drop": lambda weights: weights},
        "alibi": {"slopes": np.ones(2, np.float32)},
        "sinks": {"sinks": np.ones(2, np.float32)},
        "upcast": {"upcast": True},
        "segments": {"segments": segments},
    }[feature]
    with pytest.raises(AssertionError, match=f"{backend} attention has no"):
        jax.eval_shape(lambda q: self_attend(backend, q, q, q, 1.0, **wish), q)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (Gpt2Config(), set()),
        (Gpt2Config(attn_pdrop=0.1), {"dropout"}),
        (Gpt2Config(upcast_attn=True), {"upcast"}),
        (Gpt2Config(num_heads=4), {"wide_heads"}),
        (Gpt2Config(hidden_dim=780, num_heads=6, attn_pdrop=0.1), {"wide_heads", "odd_heads", "dropout"}),
        (LlamaConfig(), set()),
        (LlamaConfig(sliding_window=100), {"window"}),
        (LlamaConfig(attention_sinks=True), {"sinks"}),
        (LlamaConfig(head_dim=12, num_kv_heads=4), {"odd_heads"}),
        (MptConfig(), {"alibi"}),
        (MptConfig(resid_pdrop=0.1, embed_pdrop=0.1, num_heads=64), {"alibi", "odd_heads"}),
        (
            BackpackConfig(attn_pdrop=0.1, upcast_attn=True, seq_len=64),
            {"wide_values", "dropout", "upcast"},
        ),
    ],
)
def test_every_family_reports_the_needs_of_its_attention(config, needs):
    assert config.attention_needs == needs
    assert needs <= set(FEATURES)


ROOT = Path(lmtrain.__file__).parent
NAMES = set(get_args(AttentionBackend)) - {"auto"}


def words(path):
    """The strings, names and imported modules of a file of source."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")


def test_each_name_has_a_record():
    assert [kernel.name for kernel in kernels()] == [name for name in get_args(AttentionBackend) if name != "auto"]
    assert len({kernel.scope for kernel in kernels()}) == len(NAMES)
    assert kernel_of(PLAIN).platform is None


def test_no_file_outside_the_folder_names_a_kernel():
    # grouped products and linear layers have kernels of their own
    outside = [path for path in ROOT.rglob("*.py") if not {"attention", "moe", "gated_delta"} & set(path.parts)]
    assert len(outside) > 100
    naming = {str(path.relative_to(ROOT)): found for path in outside if (found := NAMES & set(words(path)))}
    assert not naming


def test_the_guide_has_the_kernels_that_are_chosen():
    """The table of parallelism.md, by device and with or without the Triton backend."""
    page = (Path(__file__).parents[3] / "configs/guide/parallelism.md").read_text().partition("## Kernels")[2]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    kinds = {"H100": H100, "B200": "NVIDIA B200", "A100": A100, "L4": "NVIDIA L4", "T4": "Tesla T4"}
    seen = set()
    for devices, version, *names, experts in rows[2:]:
        for device in devices.split(", "):
            platform = {"TPU": "tpu", "CPU": "cpu"}.get(device, "gpu")
            kind = kinds.get(device, device)
            for has_triton in {"with Triton": [True], "without": [False], "any": [True, False]}[version]:
                REMOVED.clear()
                REMOVED.update([] if has_triton else ["jax.experimental.pallas.triton"])
                found = [choose("auto", needs, platform, LONG, kind=kind).name for needs in ([], ["segments"], ["cap"])]
                assert [*found, choose_grouped(platform, kind).name] == [*names, experts], (device, version)
                seen.add((device, has_triton))
    assert len(seen) == 2 * len({"TPU", "CPU", *kinds})
