"""Parameters from Hugging Face tensors: mismatches are named, resizing is logged, on any mesh, tensor by tensor."""

import functools
import json
import logging
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from forked import fake_devices
from safetensors.numpy import load_file, save_file

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import flatten, to_hf, unflatten
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import build_model, hf_family
from lmtrain.runtime.logging import log
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.start.hf_params import gather_tensors, load_hf_params, plan_hf_pieces

VOCAB, LENGTH = 10, 12
SIZES = {"hidden_dim": 8, "num_heads": 2, "num_layers": 2, "seq_len": LENGTH}
GPT2 = Gpt2Config(**SIZES)
LLAMA = LlamaConfig(**SIZES, intermediate_dim=12)
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def random_params(config, vocab: int = VOCAB):
    """Parameters of a model; padding of the vocabulary is 0."""
    model = build_model(config, vocab)
    rng = np.random.default_rng(5)
    flat = {}
    for path, leaf in flatten(abstract_params(model)).items():
        value = rng.normal(size=leaf.value.shape).astype(np.float32)
        if "vocab" in leaf.names:
            value[vocab:] = 0
        flat[path] = value
    return unflatten(flat)


def tensors_of(config, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    return to_hf(hf_family(config.type).table(config), random_params(config, vocab), config.num_layers, vocab)


@pytest.fixture
def folder(tmp_path):
    """`folder(tensors)` writes them and returns the path."""

    def write(tensors) -> str:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
        return str(tmp_path)

    return write


WEIGHTS = "model.safetensors"


def load(ref: str, config, vocab: int = VOCAB, dtype: str = "float32") -> dict[str, np.ndarray]:
    params = load_hf_params(ref, config, build_model(config, vocab), plan_layout(PartitioningConfig()), dtype)
    return flatten(jax.device_get(params))


def assert_same(found, expected) -> None:
    """Both by path; equal in type, shape and every bit."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
        assert found[path].tobytes() == value.tobytes(), path


@pytest.fixture
def logged(caplog):
    """What lmtrain logs, as a list of lines."""
    before = log.level
    log.addHandler(caplog.handler)
    log.setLevel(logging.INFO)
    yield lambda: list(dict.fromkeys(caplog.messages))
    log.removeHandler(caplog.handler)
    log.setLevel(before)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_tensor_is_loaded_into_its_place_and_nothing_is_logged(folder, logged, config):
    assert_same(load(folder(tensors_of(config)), config), flatten(random_params(config)))
    assert logged() == []


# mismatches


def test_missing_unexpected_and_misshapen_tensors_are_each_named_in_one_error(folder):
    tensors = tensors_of(GPT2)
    del tensors["transformer.h.1.ln_2.bias"], tensors["transformer.ln_f.weight"]
    tensors["transformer.h.2.ln_1.bias"] = np.zeros(8, np.float32)
    tensors["transformer.h.0.mlp.c_fc.weight"] = np.zeros((8, 31), np.float32)
    tensors["transformer.h.0.attn.c_proj.bias"] = np.zeros((8, 1), np.float32)
    ref = folder(tensors)
    with pytest.raises(UserError) as error:
        load(ref, GPT2)
    first, *lines = str(error.value).splitlines()
    assert first == f"{ref}: its weights do not match this model"
    assert sorted(lines) == [
        "  missing transformer.h.1.ln_2.bias",
        "  missing transformer.ln_f.weight",
        "  transformer.h.0.attn.c_proj.bias is [8, 1], expected [8]",
        "  transformer.h.0.mlp.c_fc.weight is [8, 31], expected [8, 32]",
        "  unexpected transformer.h.2.ln_1.bias",
    ]


def test_of_many_mismatches_the_first_are_named_and_the_rest_counted(folder):
    """The file has fewer tensors than the model, all with unknown names."""
    few = {f"layer.{number}": np.zeros(1, np.float32) for number in range(3)}
    with pytest.raises(UserError) as error:
        load(folder(few), GPT2)
    lines = str(error.value).splitlines()
    assert lines[1] == "  missing transformer.wte.weight"
    assert len(lines) == 7
    assert lines[-1] == f"  and {len(tensors_of(GPT2)) + 3 - 5} more"


def test_another_width_is_an_error_also_for_tensors_that_are_resized(folder):
    tensors = tensors_of(GPT2) | {WTE: np.zeros((VOCAB, 6), np.float32), WPE: np.zeros((LENGTH, 9), np.float32)}
    with pytest.raises(UserError) as error:
        load(folder(tensors), GPT2)
    assert f"{WTE} is [{VOCAB}, 6], expected [{VOCAB}, 8]" in str(error.value)
    assert f"{WPE} is [{LENGTH}, 9], expected [{LENGTH}, 8]" in str(error.value)


@pytest.mark.parametrize("shape", [(), (VOCAB,), (VOCAB, 8, 1)])
def test_embeddings_of_another_rank_are_refused(folder, shape):
    for name in (WTE, WPE):
        with pytest.raises(UserError, match=rf"{name} is \["):
            load(folder(tensors_of(GPT2) | {name: np.zeros(shape, np.float32)}), GPT2)


# a tied head


def test_a_stored_head_that_equals_the_embedding_is_accepted(folder):
    tensors = tensors_of(GPT2)
    ref = folder(tensors | {HEAD: tensors[WTE].copy()})
    assert_same(load(ref, GPT2), flatten(random_params(GPT2)))


@pytest.mark.parametrize("change", ["one number", "one row less"])
def test_a_stored_head_that_differs_is_refused(folder, change):
    tensors = tensors_of(GPT2)
    head = tensors[WTE].copy()
    if change == "one number":
        head[3, 2] += 1e-6
    else:
        head = head[:-1]
    ref = folder(tensors | {HEAD: head})
    with pytest.raises(UserError) as error:
        load(ref, GPT2)
    assert str(error.value).startswith(f"{ref}: {HEAD} differs from {WTE}, ")


def test_an_untied_model_requires_its_head(folder):
    untied = Gpt2Config(**SIZES, tie_word_embeddings=False)
    assert_same(load(folder(tensors_of(untied)), untied), flatten(random_params(untied)))
    with pytest.raises(UserError, match=f"missing {HEAD}"):
        load(folder(tensors_of(GPT2)), untied)


# resizing


@pytest.mark.parametrize("multiple", [1, 8])
def test_embeddings_beyond_the_vocabulary_are_dropped(folder, logged, multiple):
    config = LlamaConfig(**SIZES, intermediate_dim=12, pad_vocab_to_multiple_of=multiple)
    tensors = tensors_of(config)
    ref = folder(tensors)
    found = load(ref, config, vocab=7)
    for path, name in (("tokens/embedding", "model.embed_tokens.weight"), ("unembed/embedding", HEAD)):
        assert len(found[path]) == (7 if multiple == 1 else 8)
        np.testing.assert_array_equal(found[path][:7], tensors[name][:7])
        assert not found[path][7:].any()
    assert logged() == [
        f"{ref}: {name}: the first 7 of 10 rows are used, to fit the tokenizer"
        for name in ("model.embed_tokens.weight", HEAD)
    ]


@pytest.mark.parametrize("multiple", [1, 8])
def test_new_tokens_are_initialized_with_the_mean_of_all(folder, logged, multiple):
    config = LlamaConfig(**SIZES, intermediate_dim=12, pad_vocab_to_multiple_of=multiple)
    tensors = tensors_of(config)
    ref = folder(tensors)
    found = load(ref, config, vocab=13)
    for path, name in (("tokens/embedding", "model.embed_tokens.weight"), ("unembed/embedding", HEAD)):
        assert len(found[path]) == (13 if multiple == 1 else 16)
        np.testing.assert_array_equal(found[path][:10], tensors[name])
        for row in found[path][10:13]:
            np.testing.assert_allclose(row, tensors[name].mean(0), rtol=1e-6)
        assert not found[path][13:].any()
    assert logged() == [
        f"{ref}: {name}: 3 rows are added to 10, each the mean of the existing rows, to fit the tokenizer"
        for name in ("model.embed_tokens.weight", HEAD)
    ]


def test_a_head_that_equals_the_embedding_is_resized_with_it(folder):
    tensors = tensors_of(GPT2)
    found = load(folder(tensors | {HEAD: tensors[WTE].copy()}), GPT2, vocab=7)
    np.testing.assert_array_equal(found["tokens/embedding"][:7], tensors[WTE][:7])
    assert not found["tokens/embedding"][7:].any()


def test_positions_are_cut_and_never_added(folder, logged):
    tensors = tensors_of(GPT2)
    ref = folder(tensors)
    found = load(ref, Gpt2Config(**SIZES | {"seq_len": 5}))
    np.testing.assert_array_equal(found["positions/embedding"], tensors[WPE][:5])
    assert logged() == [f"{ref}: {WPE}: the first 5 of 12 rows are used, to fit model.seq_len"]
    with pytest.raises(UserError, match=rf"{WPE} is \[12, 8\], expected \[20, 8\]"):
        load(ref, Gpt2Config(**SIZES | {"seq_len": 20}))


# types


def test_parameters_in_bfloat16_are_rounded_to_nearest(folder):
    expected = {path: value.astype(ml_dtypes.bfloat16) for path, value in flatten(random_params(GPT2)).items()}
    assert_same(load(folder(tensors_of(GPT2)), GPT2, dtype="bfloat16"), expected)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_files_of_other_types_are_read(folder, stored):
    tensors = {name: tensor.astype(stored) for name, tensor in tensors_of(GPT2).items()}
    expected = {path: value.astype(stored).astype(np.float32) for path, value in flatten(random_params(GPT2)).items()}
    assert_same(load(folder(tensors), GPT2), expected)


# several devices

MESH = """
import json, sys
import jax
import numpy as np
from lmtrain.hf.export import Export, write_export
from lmtrain.hf.key_map import flatten
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.sharding.placement import parameter_shardings
from lmtrain.train.start.hf_params import gather_tensors, load_hf_params, plan_hf_pieces
from lmtrain.models.params import abstract_params

model_settings, vocab, layouts, folder = json.loads(sys.argv[1])
config = RunConfig.model_validate({"model": model_settings}).model
model = build_model(config, vocab)
for name, settings in layouts.items():
    layout = plan_layout(PartitioningConfig(**settings))
    params = load_hf_params(folder + "/source", config, model, layout, "float32")
    flat, wanted = flatten(params), flatten(parameter_shardings(layout, abstract_params(model)))
    assert flat.keys() == wanted.keys()
    for path, leaf in flat.items():
        assert leaf.sharding == wanted[path], (path, leaf.sharding, wanted[path])
    ways = {path: leaf.size // leaf.addressable_shards[0].data.size for path, leaf in flat.items()}
    print(json.dumps({"devices": layout.mesh.size, "ways": ways}))
    np.savez(f"{folder}/{name}.npz", **{path: np.asarray(leaf) for path, leaf in flat.items()})
    pieces = plan_hf_pieces(config, model)
    tokenizer = Tokenizer("none", None, vocab, eos_id=None, bos_id=None, fingerprint="none")
    tensors = gather_tensors(params, pieces, layout, vocab)
    write_export(f"{folder}/{name}", Export(pieces, {}, {}, tokenizer, "float32"), tensors)
"""

LAYOUTS = {
    "fsdp": {},
    "both": {"model_axis_size": 4, "tensor_parallel_axes": ["mlp", "heads", "kv_heads", "vocab"]},
}
SPLIT = {"hidden_dim": 16, "num_heads": 4, "num_layers": 3, "seq_len": LENGTH, "pad_vocab_to_multiple_of": 4}
MODELS = {
    "gpt2": {"type": "gpt2", **SPLIT, "tie_word_embeddings": False},
    "llama": {"type": "llama", **SPLIT, "intermediate_dim": 24, "qk_norm": "all", "norm_position": "post"},
    "mpt": {"type": "mpt", **SPLIT},
    "backpack": {"type": "backpack", **SPLIT, "num_senses": 4},
}


def start(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.multi_device
@pytest.mark.parametrize(
    "family", [name if name == "llama" else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_on_8_devices_values_equal_those_on_one_and_shardings_are_as_planned(tmp_path, family):
    from lmtrain.run.config import RunConfig

    config = RunConfig.model_validate({"model": MODELS[family]}).model
    tensors = tensors_of(config)
    os.mkdir(tmp_path / "source")
    save_file(tensors, tmp_path / "source" / WEIGHTS)
    arguments = json.dumps([MODELS[family], VOCAB, LAYOUTS, str(tmp_path)])
    lines = start(MESH, arguments, XLA_FLAGS=fake_devices(8)).splitlines()
    one = load(str(tmp_path / "source"), config)
    assert_same(one, flatten(random_params(config)))
    for name, line in zip(LAYOUTS, lines, strict=True):
        report = json.loads(line)
        assert report["devices"] == 8
        assert max(report["ways"].values()) == 8
        assert_same(dict(np.load(tmp_path / f"{name}.npz")), one)
        assert_same(load_file(tmp_path / name / WEIGHTS), tensors)


def test_gathered_tensors_equal_the_stored_ones(folder):
    tensors = tensors_of(LLAMA)
    layout, model = plan_layout(PartitioningConfig()), build_model(LLAMA, VOCAB)
    params = load_hf_params(folder(tensors), LLAMA, model, layout, "float32")
    pieces = plan_hf_pieces(LLAMA, model)
    gathered = gather_tensors(params, pieces, layout, VOCAB)
    assert_same({piece.name: value for piece, value in zip(pieces, gathered, strict=True)}, tensors)


# memory

MEMORY = """
import json, sys, tracemalloc
from lmtrain.hf.weights import open_weights
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.registry import build_model
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.start import hf_params

settings, vocab, folder, at_once = json.loads(sys.argv[1])

class AllAtOnce:
    def __init__(self, ref):
        weights = open_weights(ref)
        self.shapes = weights.shapes
        self.tensors = {name: weights.read(name) for name in self.shapes}

    def read(self, name):
        return self.tensors[name]

if at_once:
    hf_params.open_weights = AllAtOnce
config = LlamaConfig(**settings)
model, layout = build_model(config, vocab), plan_layout(PartitioningConfig())
tracemalloc.start()
params = hf_params.load_hf_params(folder, config, model, layout, "float32")
peaks = [tracemalloc.get_traced_memory()[1]]
tracemalloc.reset_peak()
if at_once:
    sys.exit(print(json.dumps(peaks)))
for tensor in hf_params.gather_tensors(params, hf_params.plan_hf_pieces(config, model), layout, vocab):
    tensor.sum()
peaks.append(tracemalloc.get_traced_memory()[1])
print(json.dumps(peaks))
"""


@functools.cache
def large() -> tuple[dict, int, dict[str, tuple[int, ...]]]:
    """Settings of a llama of 290 MB, its vocabulary size, and the shapes of its tensors."""
    settings = {"hidden_dim": 1024, "intermediate_dim": 4096, "num_heads": 8, "num_layers": 4, "seq_len": 16}
    config = LlamaConfig(**settings)
    shapes = {piece.name: piece.shape for piece in plan_hf_pieces(config, build_model(config, 3000))}
    return settings, 3000, shapes


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A folder with a sparse file of zeros that occupies no disk space."""
    from lmtrain.hf.safetensors_file import header_of

    *_, shapes = large()
    folder = tmp_path_factory.mktemp("sparse")
    header = header_of(shapes, np.dtype(np.float32))
    with open(folder / WEIGHTS, "wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * sum(int(np.prod(shape)) for shape in shapes.values()))
    return str(folder)


def peaks(folder: str, at_once: bool) -> list[int]:
    """Peak bytes of Python and numpy while the parameters are loaded, and while they are gathered."""
    settings, vocab, _ = large()
    return json.loads(start(MEMORY, json.dumps([settings, vocab, folder, at_once])))


@pytest.mark.long
def test_the_host_holds_a_few_tensors_at_a_time(sparse):
    """Tensors as read, converted, and in transfer to the device, which may be one or two behind."""
    sizes = [4 * int(np.prod(shape)) for shape in large()[2].values()]
    assert sum(sizes) > 280e6 > 16 * max(sizes)
    assert max(peaks(sparse, at_once=False)) < 6 * max(sizes)
    assert peaks(sparse, at_once=True)[0] > 0.9 * sum(sizes)  # so the measurement detects it
