"""Parameters from Hugging Face tensors: types, any mesh, tensor by tensor; mismatches are named, resizing is logged.

Adapters from PEFT: their values, and the check of their base. `tests/parity/test_peft.py` reads those of PEFT.
"""

import json
import logging
import math
import os
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from forked import fake_devices, run_script
from lora.exported import Exported, config_of, load_adapter
from safetensors.numpy import load_file, save_file
from weights.hf_files import (
    GPT2,
    HEAD,
    LENGTH,
    LLAMA,
    SIZES,
    VOCAB,
    WEIGHTS,
    WPE,
    WTE,
    assert_same,
    load,
    random_params,
    tensors_of,
)

from lmtrain.hf.safetensors_file import header_of
from lmtrain.hf.weight_files import open_weights
from lmtrain.lora.config import LoraConfig
from lmtrain.lora.model import ADAPTERS
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.params import flatten
from lmtrain.models.registry import build_model
from lmtrain.runtime.errors import UserError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.train.program.program import build_program
from lmtrain.weights import load_hf
from lmtrain.weights.export_folder import BaseIdentity, ModelOrigin, marks_of
from lmtrain.weights.load_checkpoint import gather_tensors
from lmtrain.weights.load_hf import build_hf_pieces, check_base


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
    assert first.startswith(f"{ref}: ")
    named = ("h.1.ln_2.bias", "ln_f.weight", "h.0.attn.c_proj.bias is", "h.0.mlp.c_fc.weight is", "h.2.ln_1.bias")
    assert len(lines) == len(named)
    assert all(any(f"transformer.{name}" in line for line in lines) for name in named)


def test_another_width_or_rank_is_an_error_also_for_tensors_that_are_resized(folder):
    tensors = tensors_of(GPT2) | {WTE: np.zeros((VOCAB, 6), np.float32), WPE: np.zeros((LENGTH, 9), np.float32)}
    with pytest.raises(UserError) as error:
        load(folder(tensors), GPT2)
    assert f"{WTE} is [{VOCAB}, 6], expected [{VOCAB}, 8]" in str(error.value)
    assert f"{WPE} is [{LENGTH}, 9], expected [{LENGTH}, 8]" in str(error.value)
    for name, shape in ((WTE, ()), (WPE, (VOCAB,)), (WTE, (VOCAB, 8, 1))):
        with pytest.raises(UserError, match=rf"{name} is \["):
            load(folder(tensors_of(GPT2) | {name: np.zeros(shape, np.float32)}), GPT2)


# a tied head


def test_a_stored_head_has_to_equal_the_embedding(folder):
    tensors = tensors_of(GPT2)
    head = tensors[WTE].copy()
    ref = folder(tensors | {HEAD: head})
    assert_same(load(ref, GPT2), flatten(random_params(GPT2)))
    resized = load(ref, GPT2, vocab=7)
    np.testing.assert_array_equal(resized["tokens/embedding"][:7], tensors[WTE][:7])
    assert not resized["tokens/embedding"][7:].any()
    one_row_less = head[:-1].copy()
    head[3, 2] += 1e-6
    for other in (head, one_row_less):
        with pytest.raises(UserError, match=f"{HEAD} differs from {WTE}"):
            load(folder(tensors | {HEAD: other}), GPT2)


def test_an_untied_model_requires_its_head(folder):
    untied = Gpt2Config(**SIZES, tie_word_embeddings=False)
    assert_same(load(folder(tensors_of(untied)), untied), flatten(random_params(untied)))
    with pytest.raises(UserError, match=f"missing {HEAD}"):
        load(folder(tensors_of(GPT2)), untied)


# resizing


@pytest.mark.parametrize(("multiple", "vocab", "what"), [(1, 7, "the first 7 of 10 rows"), (8, 13, "3 rows")])
def test_embeddings_are_resized_to_the_vocabulary_and_new_ones_are_the_mean(folder, logged, multiple, vocab, what):
    config = LlamaConfig(**SIZES, intermediate_dim=12, pad_vocab_to_multiple_of=multiple)
    tensors = tensors_of(config)
    ref = folder(tensors)
    params = load(ref, config, vocab=vocab)
    for path, name in (("tokens/embedding", "model.embed_tokens.weight"), ("unembed/embedding", HEAD)):
        assert len(params[path]) == (vocab if multiple == 1 else -(-vocab // 8) * 8)
        kept = min(vocab, 10)
        np.testing.assert_array_equal(params[path][:kept], tensors[name][:kept])
        for row in params[path][kept:vocab]:
            np.testing.assert_allclose(row, tensors[name].mean(0), rtol=1e-6)
        assert not params[path][vocab:].any()
    lines = [f"{ref}: {name}: {what} " for name in ("model.embed_tokens.weight", HEAD)]
    assert [line.startswith(begin) for line, begin in zip(logged(), lines, strict=True)] == [True, True]


def test_positions_are_cut_and_never_added(folder, logged):
    tensors = tensors_of(GPT2)
    ref = folder(tensors)
    found = load(ref, Gpt2Config(**SIZES | {"seq_len": 5}))
    np.testing.assert_array_equal(found["positions/embedding"], tensors[WPE][:5])
    (line,) = logged()
    assert line.startswith(f"{ref}: {WPE}: the first 5 of 12 rows")
    with pytest.raises(UserError, match=rf"{WPE} is \[12, 8\], expected \[20, 8\]"):
        load(ref, Gpt2Config(**SIZES | {"seq_len": 20}))


# types, meshes, memory


def test_parameters_in_bfloat16_are_rounded_to_nearest(folder):
    expected = {path: value.astype(ml_dtypes.bfloat16) for path, value in flatten(random_params(GPT2)).items()}
    assert_same(load(folder(tensors_of(GPT2)), GPT2, dtype="bfloat16"), expected)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float64])
def test_files_of_other_types_are_read(folder, stored):
    tensors = {name: tensor.astype(stored) for name, tensor in tensors_of(GPT2).items()}
    expected = {path: value.astype(stored).astype(np.float32) for path, value in flatten(random_params(GPT2)).items()}
    assert_same(load(folder(tensors), GPT2), expected)


def test_numbers_that_are_not_floating_point_are_refused(folder):
    tensors = tensors_of(GPT2)
    tensors["transformer.ln_f.bias"] = np.zeros(8, np.int32)
    with pytest.raises(UserError, match=r"transformer\.ln_f\.bias holds int32"):
        load(folder(tensors), GPT2)


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
from lmtrain.weights.load_checkpoint import gather_tensors
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


# Four key heads, so that they can be split, too; their tensors join four parameters by head.
HYBRID = {
    "intermediate_dim": 24,
    "layer_pattern": ["linear", "full"],
    "linear_attention": {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 4, "value_head_dim": 6},
    "qk_norm": "head",
    "norm_offset": True,
    "attention_gate": True,
    "moe": {"num_experts": 4, "intermediate_dim": 8, "shared_experts": 1, "shared_gate": True},
}


MODELS = {
    "gpt2": {"type": "gpt2", **SPLIT, "tie_word_embeddings": False},
    "llama": {"type": "llama", **SPLIT, "intermediate_dim": 24, "qk_norm": "all", "norm_position": "post"},
    "hybrid": {"type": "llama", **SPLIT, **HYBRID},
    "mpt": {"type": "mpt", **SPLIT},
    "backpack": {"type": "backpack", **SPLIT, "num_senses": 4},
}


@pytest.mark.multi_device
@pytest.mark.parametrize(
    "family", [name if name == "hybrid" else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_on_8_devices_values_equal_those_on_one_and_shardings_are_as_planned(tmp_path, family):
    from lmtrain.run.config import RunConfig

    config = RunConfig.model_validate({"model": MODELS[family]}).model
    tensors = tensors_of(config)
    os.mkdir(tmp_path / "source")
    save_file(tensors, tmp_path / "source" / WEIGHTS)
    arguments = json.dumps([MODELS[family], VOCAB, LAYOUTS, str(tmp_path)])
    lines = run_script(MESH, arguments, folder=tmp_path, XLA_FLAGS=fake_devices(8)).splitlines()
    one = load(str(tmp_path / "source"), config)
    assert_same(one, flatten(random_params(config)))
    for name, line in zip(LAYOUTS, lines, strict=True):
        report = json.loads(line)
        assert report["devices"] == 8
        assert max(report["ways"].values()) == 8
        assert_same(dict(np.load(tmp_path / f"{name}.npz")), one)
        assert_same(load_file(tmp_path / name / WEIGHTS), tensors)


LARGE = LlamaConfig(hidden_dim=1024, intermediate_dim=4096, num_heads=8, num_layers=4, seq_len=16)


@pytest.mark.long
def test_the_host_holds_a_few_tensors_at_a_time(tmp_path, monkeypatch):
    """Tensors as read, converted, and in transfer to the device, which may be one or two behind. 290 MB in all."""
    model, layout = build_model(LARGE, 3000), build_layout(PartitioningConfig())
    pieces = build_hf_pieces(LARGE, model)
    sizes = [4 * math.prod(piece.shape) for piece in pieces]
    assert sum(sizes) > 280e6 > 16 * max(sizes)
    header = header_of({piece.name: (piece.shape, np.dtype(np.float32)) for piece in pieces})
    with open(tmp_path / WEIGHTS, "wb") as file:  # sparse: zeros that occupy no disk space
        file.write(header)
        file.truncate(len(header) + sum(sizes))

    def peak(work) -> tuple[object, int]:
        tracemalloc.start()
        try:
            return work(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def load_params():
        return load_hf.load_hf_params(str(tmp_path), LARGE, model, layout, "float32")

    params, loading = peak(load_params)
    _, gathering = peak(lambda: [tensor.sum() for tensor in gather_tensors(params, pieces, layout, 3000)])
    assert max(loading, gathering) < 6 * max(sizes)

    class AllAtOnce:
        def __init__(self, ref):
            weights = open_weights(ref)
            self.shapes = weights.shapes
            self.tensors = {name: weights.read(name) for name in self.shapes}

        def read(self, name):
            return self.tensors[name]

    monkeypatch.setattr(load_hf, "open_weights", AllAtOnce)
    assert peak(load_params)[1] > 0.9 * sum(sizes)  # so the measurement detects it


# adapters


TABLES = ["embed_tokens", "lm_head"]
CASES = {
    "gpt2 with trained tied tables": ("gpt2", {"modules_to_save": TABLES}),
    "llama with trained tables": ("llama", {"modules_to_save": TABLES, "target_modules": ["q_proj", "v_proj"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_exported_adapter_is_read_back_bit_for_bit(tmp_path, case):
    family, lora = CASES[case]
    exported = Exported(tmp_path, family, {}, lora)
    program = build_program(exported.reading("adapter"), exported.model.vocab_size)
    read = load_adapter(program, str(tmp_path / "adapter"))
    size = exported.model.vocab_size
    leaves = jax.tree_util.tree_leaves_with_path(exported.params[ADAPTERS])
    for (path, ours), theirs in zip(leaves, jax.tree.leaves(read), strict=True):
        rows = slice(size) if "embedding" in str(path) else slice(None)
        np.testing.assert_array_equal(ours[rows], theirs[rows])


def test_an_adapter_with_other_layers_is_refused_by_name(tmp_path):
    exported = Exported(tmp_path, "llama", {}, {"target_modules": ["q_proj"]})
    adapter = str(tmp_path / "adapter")
    config = config_of("llama", {}, {"target_modules": ["q_proj", "o_proj"], "initialize_from": adapter})
    program = build_program(config, exported.model.vocab_size)
    with pytest.raises(UserError, match=r"(?s)missing base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"):
        load_adapter(program, str(tmp_path / "adapter"))


OURS = BaseIdentity("0" * 32, "float32")


@pytest.mark.parametrize(
    ("trained_on", "allow", "message"),
    [
        (None, False, "base model"),
        (BaseIdentity("1" * 32, "bfloat16"), False, "bfloat16"),
        (OURS, False, None),
        (BaseIdentity("1" * 32, "float32"), True, "111111111111"),
    ],
)
def test_a_base_that_cannot_be_compared_or_that_may_differ_gets_a_warning(tmp_path, caplog, trained_on, allow, message):
    config = LoraConfig(initialize_from=str(tmp_path), allow_other_base=allow)
    marks = marks_of(ModelOrigin("one", "data", trained_on), with_base=True)
    (tmp_path / "lmtrain.json").write_text(json.dumps(marks))
    with caplog.at_level(logging.WARNING, "lmtrain"):
        check_base(config, OURS)
    assert [message in line for line in caplog.messages] == ([True] if message else [])
    if allow:
        with pytest.raises(UserError, match=r"lora\.allow_other_base"):
            check_base(config.model_copy(update={"allow_other_base": False}), OURS)
