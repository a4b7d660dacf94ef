"""Stored tensors as parameters: types, any mesh, tensor by tensor."""

import functools
import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from forked import fake_devices
from safetensors.numpy import load_file, save_file
from weights.hf_files import GPT2, LENGTH, VOCAB, WEIGHTS, assert_same, load, random_params, tensors_of

from lmtrain.hf.weight_files import open_weights
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.params import flatten
from lmtrain.models.registry import build_model
from lmtrain.runtime.errors import UserError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.load_hf import are_equal, build_hf_pieces, split_rows


def test_parameters_in_bfloat16_are_rounded_to_nearest(folder):
    expected = {path: value.astype(ml_dtypes.bfloat16) for path, value in flatten(random_params(GPT2)).items()}
    assert_same(load(folder(tensors_of(GPT2)), GPT2, dtype="bfloat16"), expected)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_files_of_other_types_are_read(folder, stored):
    tensors = {name: tensor.astype(stored) for name, tensor in tensors_of(GPT2).items()}
    expected = {path: value.astype(stored).astype(np.float32) for path, value in flatten(random_params(GPT2)).items()}
    assert_same(load(folder(tensors), GPT2), expected)


def test_numbers_that_are_not_floating_point_are_refused(folder):
    tensors = tensors_of(GPT2)
    tensors["transformer.ln_f.bias"] = np.zeros(8, np.int32)
    with pytest.raises(UserError, match=r"transformer\.ln_f\.bias holds int32, not floating-point numbers; quantized"):
        load(folder(tensors), GPT2)


def test_tensors_are_equal_in_shape_and_every_number(folder):
    one = np.arange(6.0).reshape(3, 2)
    other = one.copy()
    other[2, 1] += 1e-9
    weights = open_weights(folder({"one": one, "same": one, "flat": one.ravel(), "other": other}))
    layout = build_layout(PartitioningConfig())
    equal = [name for name in weights.shapes if are_equal("here", weights, "one", name, layout)]
    assert sorted(equal) == ["one", "same"]


def test_rows_are_read_in_shares_and_padded():
    rows, asked = np.arange(10.0).reshape(5, 2), []

    def read(first, last):
        asked.append((first, last))
        return rows[first:last]

    split = split_rows(read, rows.shape, build_layout(PartitioningConfig()))
    assert asked == [(0, 5)]
    np.testing.assert_array_equal(split[:5], rows)


MESH = """
import json, sys
import jax
import numpy as np
from lmtrain.weights.write_export import Export
from lmtrain.weights.write_export import write_export
from lmtrain.models.params import flatten
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.sharding.placement import parameter_shardings
from lmtrain.weights.write_export import gather_tensors
from lmtrain.weights.load_hf import build_hf_pieces, load_hf_params
from lmtrain.models.params import abstract_params

model_settings, vocab, layouts, folder = json.loads(sys.argv[1])
config = RunConfig.model_validate({"model": model_settings}).model
model = build_model(config, vocab)
for name, settings in layouts.items():
    layout = build_layout(PartitioningConfig(**settings))
    params = load_hf_params(folder + "/source", config, model, layout, "float32")
    flat, wanted = flatten(params), flatten(parameter_shardings(layout, abstract_params(model)))
    assert flat.keys() == wanted.keys()
    for path, leaf in flat.items():
        assert leaf.sharding == wanted[path], (path, leaf.sharding, wanted[path])
    ways = {path: leaf.size // leaf.addressable_shards[0].data.size for path, leaf in flat.items()}
    print(json.dumps({"devices": layout.mesh.size, "ways": ways}))
    np.savez(f"{folder}/{name}.npz", **{path: np.asarray(leaf) for path, leaf in flat.items()})
    pieces = build_hf_pieces(config, model)
    tokenizer = Tokenizer(path="none", library=None, vocab_size=vocab, eos_id=None, bos_id=None, fingerprint="none")
    tensors = gather_tensors(params, pieces, layout, vocab)
    export = Export(pieces=pieces, config={}, extra_files={}, tokenizer=tokenizer, dtype="float32")
    write_export(f"{folder}/{name}", export, tensors)
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


MEMORY = """
import json, sys, tracemalloc
from lmtrain.hf.weight_files import open_weights
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.registry import build_model
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights import load_hf
from lmtrain.weights.write_export import gather_tensors

settings, vocab, folder, at_once = json.loads(sys.argv[1])

class AllAtOnce:
    def __init__(self, ref):
        weights = open_weights(ref)
        self.shapes = weights.shapes
        self.tensors = {name: weights.read(name) for name in self.shapes}

    def read(self, name):
        return self.tensors[name]

if at_once:
    load_hf.open_weights = AllAtOnce
config = LlamaConfig(**settings)
model, layout = build_model(config, vocab), build_layout(PartitioningConfig())
tracemalloc.start()
params = load_hf.load_hf_params(folder, config, model, layout, "float32")
peaks = [tracemalloc.get_traced_memory()[1]]
tracemalloc.reset_peak()
if at_once:
    sys.exit(print(json.dumps(peaks)))
for tensor in gather_tensors(params, load_hf.build_hf_pieces(config, model), layout, vocab):
    tensor.sum()
peaks.append(tracemalloc.get_traced_memory()[1])
print(json.dumps(peaks))
"""


@functools.cache
def large() -> tuple[dict, int, dict[str, tuple[int, ...]]]:
    """Settings of a llama of 290 MB, its vocabulary size, and the shapes of its tensors."""
    settings = {"hidden_dim": 1024, "intermediate_dim": 4096, "num_heads": 8, "num_layers": 4, "seq_len": 16}
    config = LlamaConfig(**settings)
    shapes = {piece.name: piece.shape for piece in build_hf_pieces(config, build_model(config, 3000))}
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
