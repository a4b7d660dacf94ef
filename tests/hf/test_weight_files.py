"""Weights of a model in a folder: one or several files of safetensors or torch, and their errors."""

import json
import os
import sys
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save

from lmtrain.hf.find_tokenizer import find_tokenizer
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.hf.weight_files import TorchWeights, locate, open_weights, read_model_config, read_model_json
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import is_url, join, open_fs, write_bytes

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array(2.5, np.float16),
    "d": np.zeros((0, 3), np.float32),
}
PARTS = {"one": ["a", "d"], "two": ["b"], "three": ["c"]}


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.fixture(params=["path", "memory"])
def folder(request, tmp_path):
    """An empty folder: at a local path, then at a URL."""
    if request.param == "path":
        os.mkdir(tmp_path / "model")
        yield str(tmp_path / "model")
        return
    url = f"memory://{tmp_path}/model"
    yield url
    fs, inside = open_fs(url)
    if fs.exists(inside):
        fs.rm(inside, recursive=True)


def save_sharded(folder, ending: str, write) -> None:
    """Save three files and their index; `write(path, tensors)` writes one file."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    for part, names in PARTS.items():
        write(join(str(folder), f"{stem}-{part}.{ending}"), {name: TENSORS[name] for name in names})
    where = {name: f"{stem}-{part}.{ending}" for part, names in PARTS.items() for name in names}
    save_index(folder, {"metadata": {"total_size": 100}, "weight_map": where}, f"{stem}.{ending}.index.json")


def save_index(folder, values, name="model.safetensors.index.json") -> None:
    write_bytes(join(str(folder), name), json.dumps(values).encode())


def write_safetensors(path: str, tensors) -> None:
    write_bytes(path, save(tensors))


def write_torch(path: str, tensors) -> None:
    torch.save({name: to_torch(array) for name, array in tensors.items()}, path)


def assert_same(weights) -> None:
    assert weights.shapes == {name: array.shape for name, array in TENSORS.items()}
    for name, array in TENSORS.items():
        found = weights.read(name)
        assert (found.dtype, found.shape) == (array.dtype, array.shape), name
        assert found.tobytes() == array.tobytes(), name


# safetensors


@pytest.mark.parametrize("is_sharded", [False, True])
def test_safetensors_are_read_from_one_file_or_several(folder, is_sharded):
    if is_sharded:
        save_sharded(folder, "safetensors", write_safetensors)
    else:
        write_safetensors(join(folder, "model.safetensors"), TENSORS)
    assert_same(open_weights(folder))


def test_a_tilde_is_the_home_folder_and_safetensors_take_precedence_over_torch_files(tmp_path, monkeypatch):
    os.mkdir(tmp_path / "model")
    write_safetensors(str(tmp_path / "model" / "model.safetensors"), TENSORS)
    write_torch(str(tmp_path / "model" / "pytorch_model.bin"), {"other": TENSORS["a"]})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_same(open_weights("~/model"))


def test_a_corrupt_or_missing_file_among_several_and_an_index_without_names_are_refused(folder):
    save_sharded(folder, "safetensors", write_safetensors)
    write_bytes(join(folder, "model-three.safetensors"), b"not found\n")
    with pytest.raises(UserError, match=r"model-three\.safetensors: not a safetensors file"):
        open_weights(folder)
    fs, inside = open_fs(join(folder, "model-two.safetensors"))
    fs.rm(inside)
    with pytest.raises(UserError, match=f"^{folder}: model-two.safetensors is missing"):
        open_weights(folder)
    for values in ({}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}):
        save_index(folder, values)
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json .*weight_map"):
            open_weights(folder)


@pytest.mark.parametrize(
    ("outside", "ending"),
    [
        *((outside, "safetensors") for outside in ("/outside", "part/../../outside", "..\\outside")),
        *((outside, "bin") for outside in ("../outside", "memory://outside")),
    ],
)
def test_an_index_that_names_a_file_outside_the_folder_is_refused(tmp_path, outside, ending):
    (tmp_path / "model" / "part").mkdir(parents=True)
    name = f"{outside}.{ending}"
    write_safetensors(str(tmp_path / f"outside.{ending}"), {"a": TENSORS["a"]})
    stem = "model" if ending == "safetensors" else "pytorch_model"
    save_index(tmp_path / "model", {"weight_map": {"a": name}}, f"{stem}.{ending}.index.json")
    with pytest.raises(UserError, match=r"index\.json names .*outside"):
        open_weights(str(tmp_path / "model"))


def test_an_index_may_name_files_in_a_folder_of_the_model(folder):
    if not is_url(folder):
        os.mkdir(join(folder, "parts.1"))
    write_safetensors(join(folder, "parts.1", "a..b.safetensors"), {"a": TENSORS["a"]})
    save_index(folder, {"weight_map": {"a": "parts.1/a..b.safetensors"}})
    np.testing.assert_array_equal(open_weights(folder).read("a"), TENSORS["a"])


@pytest.mark.parametrize(
    "content",
    [b'{"weight_map": {"a"', b'{"a":' * 100_000, b"", b"\xff\xfe{", b"[]"],
    ids=["cut", "deep", "empty", "bytes", "list"],
)
def test_an_index_or_config_that_is_not_a_json_object_is_refused(folder, content):
    for name in ("config.json", "model.safetensors.index.json"):
        write_bytes(join(folder, name), content)
    for name, read in (("config.json", read_model_config), ("model.safetensors.index.json", open_weights)):
        with pytest.raises(UserError, match=f"^{folder}: {name} "):
            read(folder)


# torch files


def test_torch_files_are_read_also_from_several(tmp_path):
    save_sharded(tmp_path, "bin", write_torch)
    assert_same(open_weights(str(tmp_path)))
    os.remove(tmp_path / "pytorch_model-one.bin")
    with pytest.raises(UserError, match=r"pytorch_model-one\.bin is missing"):
        open_weights(str(tmp_path))


TWO = torch.ones(2)
BEFORE_1_6 = {"_use_new_zipfile_serialization": False}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "pytorch_model.bin")


def refusal(path: str) -> str:
    with pytest.raises(UserError) as error:
        TorchWeights([path])
    return str(error.value)


@pytest.mark.parametrize("options", [{}, BEFORE_1_6], ids=["zip", "before 1.6"])
def test_tensors_are_read_in_their_dtypes(path, options):
    torch.save(OrderedDict((name, to_torch(array)) for name, array in TENSORS.items()), path, **options)
    weights = TorchWeights([path])
    assert weights.dtypes == {name: array.dtype.name for name, array in TENSORS.items()}
    assert_same(weights)


def test_a_tensor_does_not_change_with_the_file_after_the_read(path):
    torch.save({"a": torch.full((16,), 3.0)}, path)
    read = TorchWeights([path]).read("a")
    with open(path, "r+b") as file:
        content = file.read().replace(np.float32(3).tobytes(), np.float32(4).tobytes())
        file.seek(0)
        file.write(content)
    np.testing.assert_array_equal(read, np.full(16, 3, np.float32))


def test_views_transposes_and_parameters_are_read_correctly(path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"t": base.T, "row": base[1], "half": base.bfloat16().T, "parameter": torch.nn.Parameter(base)}
    torch.save(tensors, path)
    weights = TorchWeights([path])
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights.read(name).astype(np.float32), tensor.detach().float().numpy())
    np.testing.assert_array_equal(weights.read_rows("t", 1, 3), base.T[1:3].numpy())


class Code:
    """Unpickling this creates a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("options", [{}, BEFORE_1_6], ids=["zip", "before 1.6"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, path, options):
    torch.save({"a": TWO, "b": Code(str(tmp_path / "was run"))}, path, **options)
    assert refusal(path).startswith(f"{path}: ")
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
    torch.load(path, weights_only=False)["b"].close()  # this runs the code
    assert (tmp_path / "was run").exists()


@pytest.mark.parametrize("content", [{"a": TWO, "epoch": 3}, {"model": {"a": TWO}}, [TWO], {0: TWO}], ids=str)
def test_content_other_than_a_map_of_names_to_tensors_is_refused(path, content):
    torch.save(content, path)
    assert refusal(path).startswith(f"{path}: ")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(90), None])
def test_an_invalid_or_truncated_file_is_an_error_with_its_name(path, content):
    if content is None:
        torch.save({"a": torch.zeros(5000)}, path)
        with open(path, "rb") as file:
            content = file.read()[:9000]
    with open(path, "wb") as file:
        file.write(content)
    assert refusal(path).startswith(f"{path}: ")


def test_urls_and_a_missing_torch_are_errors(path, monkeypatch):
    assert refusal(f"memory://{path}").startswith(f"memory://{path}: ")
    torch.save({"a": TWO}, path)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "`pip install torch`" in refusal(path)


# of two layouts


def test_one_file_is_read_and_not_an_index_next_to_it_as_in_transformers(folder, caplog):
    save_sharded(
        folder, "safetensors", lambda path, tensors: write_safetensors(path, dict.fromkeys(tensors, TENSORS["b"]))
    )
    write_safetensors(join(folder, "model.safetensors"), TENSORS)
    assert_same(open_weights(folder))
    assert "model.safetensors.index.json" in caplog.text
    caplog.clear()
    save_index(folder, {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")})
    assert_same(open_weights(folder))
    assert not caplog.messages


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda where: where.pop("d"), r" d,.*model-one\."),
        (lambda where: where.update(e=where["b"]), r" e .*model-two\."),
        (lambda where: where.update(a=where["b"]), r" a .*model-two\."),
    ],
)
def test_an_index_that_does_not_describe_its_files_is_refused(tmp_path, ending, change, message):
    save_sharded(tmp_path, ending, write_safetensors if ending == "safetensors" else write_torch)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    path = tmp_path / f"{stem}.{ending}.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        open_weights(str(tmp_path))


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_tensor_in_two_files_is_refused(tmp_path, ending):
    write, stem = {"safetensors": (write_safetensors, "model"), "bin": (write_torch, "pytorch_model")}[ending]
    save_sharded(tmp_path, ending, write)
    write(str(tmp_path / f"{stem}-two.{ending}"), {"a": TENSORS["a"], "b": TENSORS["b"]})
    with pytest.raises(UserError, match=rf"a is also in .*{stem}-"):
        open_weights(str(tmp_path))


# config.json, and the folder itself


def test_a_config_is_read(folder):
    with pytest.raises(UserError, match=r"no config\.json"):
        read_model_config(folder)
    write_bytes(join(folder, "config.json"), '{"model_type": "gpt2", "ü": null}'.encode())
    assert read_model_config(folder) == {"model_type": "gpt2", "ü": None}
    assert read_model_json(folder, "generation_config.json") is None
    assert locate(folder, "config.json") == join(folder, "config.json")
    assert locate(folder, "tokenizer.json") is None
    with pytest.raises(UserError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        ("./exports/step-9", "no such folder"),
        ("~/nothing-of-that-name", "no such folder"),
        ("a/b/c", "no local folder"),
        ("acme/nothing-of-that-name", "cannot be read from the hub"),
    ],
)
def test_a_missing_folder_is_an_error_and_also_one_that_is_no_hub_id(ref, reason, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=f"(?s){ref}.*{reason}"):
        open_weights(ref)


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("model.safetensors", open_weights),
        ("pytorch_model.bin", open_weights),
        ("config.json", read_model_config),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer.model", lambda folder: find_tokenizer(f"{folder}/tokenizer.model")),
    ],
)
def test_a_pointer_of_git_lfs_is_named_with_the_command_that_downloads_the_file(tmp_path, name, load):
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17082660\n")
    with pytest.raises(UserError, match=rf"{name}.*git lfs pull"):
        load(str(tmp_path))
