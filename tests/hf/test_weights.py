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

from lmtrain.config.errors import UserError
from lmtrain.hf.weights import locate, open_weights, read_model_config, read_model_json
from lmtrain.runtime.storage import join, open_fs, write_bytes

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array(2.5, np.float16),
    "d": np.zeros((0, 3), np.float32),
}
PARTS = {"one": ["a", "d"], "two": ["b"], "three": ["c"]}


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


def write_torch(path: str, tensors, **options) -> None:
    torch.save(OrderedDict((name, to_torch(array)) for name, array in tensors.items()), path, **options)


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def assert_same(weights) -> None:
    assert weights.shapes == {name: array.shape for name, array in TENSORS.items()}
    for name, array in TENSORS.items():
        found = weights.read(name)
        assert (found.dtype, found.shape) == (array.dtype, array.shape), name
        assert found.tobytes() == array.tobytes(), name


# safetensors


def test_one_safetensors_file(folder):
    write_safetensors(join(folder, "model.safetensors"), TENSORS)
    assert_same(open_weights(folder))


def test_several_safetensors_files(folder):
    save_sharded(folder, "safetensors", write_safetensors)
    assert_same(open_weights(folder))


def test_a_tilde_is_expanded_to_the_home_folder(tmp_path, monkeypatch):
    os.mkdir(tmp_path / "model")
    write_safetensors(str(tmp_path / "model" / "model.safetensors"), TENSORS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_same(open_weights("~/model"))


def test_safetensors_take_precedence_over_torch_files(tmp_path):
    write_safetensors(str(tmp_path / "model.safetensors"), TENSORS)
    write_torch(str(tmp_path / "pytorch_model.bin"), {"other": TENSORS["a"]})
    assert_same(open_weights(str(tmp_path)))


def test_a_missing_file_of_the_index_is_an_error(folder):
    save_sharded(folder, "safetensors", write_safetensors)
    fs, inside = open_fs(join(folder, "model-two.safetensors"))
    fs.rm(inside)
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert str(error.value).startswith(f"{folder}: model-two.safetensors is missing")


def test_a_corrupt_file_among_several_is_named(folder):
    save_sharded(folder, "safetensors", write_safetensors)
    write_bytes(join(folder, "model-three.safetensors"), b"not found\n")
    with pytest.raises(UserError, match=r"model-three\.safetensors: not a safetensors file"):
        open_weights(folder)


@pytest.mark.parametrize("values", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": None}], ids=str)
def test_an_index_without_a_map_is_refused(folder, values):
    save_index(folder, values)
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert str(error.value) == f"{folder}: model.safetensors.index.json has no weight_map"


@pytest.mark.parametrize("file", [3, None, ["model-one.safetensors"]], ids=str)
def test_an_index_without_file_names_is_refused(tmp_path, file):
    save_index(tmp_path, {"weight_map": {"a": file}})
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        open_weights(str(tmp_path))


def test_an_index_that_is_not_json_is_refused(folder):
    write_bytes(join(folder, "model.safetensors.index.json"), b'{"weight_map": {"a"')
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert str(error.value).startswith(f"{folder}: model.safetensors.index.json is not valid JSON: ")


def test_a_folder_without_weights(folder):
    write_bytes(join(folder, "config.json"), b"{}")
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert str(error.value) == f"{folder}: there is no model.safetensors and no pytorch_model.bin"


# torch files


def test_one_torch_file(tmp_path):
    write_torch(str(tmp_path / "pytorch_model.bin"), TENSORS)
    assert_same(open_weights(str(tmp_path)))


def test_a_torch_file_from_before_1_6(tmp_path):
    write_torch(str(tmp_path / "pytorch_model.bin"), TENSORS, _use_new_zipfile_serialization=False)
    assert_same(open_weights(str(tmp_path)))


def test_a_tensor_does_not_change_with_the_file_after_the_read(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.full((16,), 3.0)}, path)
    found = open_weights(str(tmp_path)).read("a")
    content = path.read_bytes().replace(np.float32(3).tobytes(), np.float32(4).tobytes())
    with open(path, "r+b") as file:
        file.write(content)
    np.testing.assert_array_equal(found, np.full(16, 3, np.float32))


def test_several_torch_files(tmp_path):
    save_sharded(tmp_path, "bin", write_torch)
    assert_same(open_weights(str(tmp_path)))


def test_a_missing_torch_file_of_the_index_is_an_error(tmp_path):
    save_sharded(tmp_path, "bin", write_torch)
    os.remove(tmp_path / "pytorch_model-one.bin")
    with pytest.raises(UserError, match=r"pytorch_model-one\.bin is missing"):
        open_weights(str(tmp_path))


def test_views_and_transposes_of_tensors_are_read_correctly(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"t": base.T, "row": base[1], "half": base.bfloat16().T}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    weights = open_weights(str(tmp_path))
    np.testing.assert_array_equal(weights.read("t"), base.T.numpy())
    np.testing.assert_array_equal(weights.read("row"), base[1].numpy())
    np.testing.assert_array_equal(weights.read("half").astype(np.float32), base.T.numpy())


def test_parameters_are_read_as_tensors(tmp_path):
    torch.save({"a": torch.nn.Parameter(torch.ones(2))}, tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(open_weights(str(tmp_path)).read("a"), [1, 1])


class Code:
    """Unpickling this creates a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before 1.6"])
def test_code_in_a_torch_file_is_refused_and_not_run(tmp_path, options):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2), "b": Code(str(tmp_path / "was run"))}, path, **options)
    with pytest.raises(UserError) as error:
        open_weights(str(tmp_path))
    assert str(error.value).startswith(f"{path}: holds more than tensors, or is corrupt")
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
    torch.load(path, weights_only=False)["b"].close()  # this runs the code
    assert (tmp_path / "was run").exists()


@pytest.mark.parametrize(
    "content",
    [{"a": torch.ones(2), "epoch": 3}, {"model": {"a": torch.ones(2)}}, [torch.ones(2)], torch.ones(2), {"a": None}],
    ids=["number", "nested", "list", "tensor", "none"],
)
def test_content_other_than_a_map_of_tensors_is_refused(tmp_path, content):
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(UserError) as error:
        open_weights(str(tmp_path))
    assert str(error.value) == f"{path}: not a map of names to tensors"


def test_a_tensor_whose_name_is_a_number_is_refused(tmp_path):
    torch.save({0: torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="not a map of names to tensors"):
        open_weights(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04" + bytes(90)])
def test_an_invalid_torch_file_is_an_error_with_its_name(tmp_path, content):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        open_weights(str(tmp_path))
    assert str(error.value).startswith(f"{path}: ")


def test_a_truncated_torch_file_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_torch(str(path), {"a": np.zeros(5000, np.float32)})
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(UserError, match=r"pytorch_model\.bin: torch cannot load it: "):
        open_weights(str(tmp_path))


def test_torch_files_are_not_read_from_urls(tmp_path):
    url = f"memory://{tmp_path}/torch"
    write_bytes(f"{url}/pytorch_model.bin", b"?")
    with pytest.raises(UserError) as error:
        open_weights(url)
    assert str(error.value).startswith(f"{url}/pytorch_model.bin: ")
    assert "copy the folder first" in str(error.value)


def test_without_torch_its_files_are_an_error_with_advice(tmp_path, monkeypatch):
    write_torch(str(tmp_path / "pytorch_model.bin"), TENSORS)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: requires torch: run `pip install torch`"):
        open_weights(str(tmp_path))


# config.json, and the folder itself


def test_a_config_is_read(folder):
    write_bytes(join(folder, "config.json"), '{"model_type": "gpt2", "ü": null}'.encode())
    assert read_model_config(folder) == {"model_type": "gpt2", "ü": None}
    assert read_model_json(folder, "generation_config.json") is None
    assert locate(folder, "config.json") == join(folder, "config.json")
    assert locate(folder, "tokenizer.json") is None


def test_a_folder_without_a_config(folder):
    write_safetensors(join(folder, "model.safetensors"), TENSORS)
    with pytest.raises(UserError) as error:
        read_model_config(folder)
    assert str(error.value) == f"{folder}: there is no config.json; not a Hugging Face model"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{'a': 1}", "is not valid JSON: "), (b"", "is not valid JSON: "), (b"\xff\xfe{", "is not valid JSON: ")]
    + [(text, "is not a JSON object") for text in (b"[]", b"3", b"null", b'"gpt2"')],
)
def test_a_config_that_is_not_an_object_is_an_error_with_its_name(folder, content, reason):
    write_bytes(join(folder, "config.json"), content)
    with pytest.raises(UserError) as error:
        read_model_config(folder)
    assert str(error.value).startswith(f"{folder}: config.json {reason}")


@pytest.mark.parametrize(
    "ref", ["./exports/step-9", "/no/such folder", "~/nothing-of-that-name", "../x", "a b", "a/b/c"]
)
def test_a_missing_folder_that_is_no_valid_hub_id_is_an_error(ref, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError) as error:
        open_weights(ref)
    assert "no such folder" in str(error.value) or f"there is no local folder {ref} either" in str(error.value)
    assert ref in str(error.value).splitlines()[0]


def test_an_unavailable_hub_id_is_reported_as_neither_on_the_hub_nor_local():
    with pytest.raises(UserError) as error:
        open_weights("acme/nothing-of-that-name")
    assert "cannot be read from the hub" in str(error.value)
    assert str(error.value).endswith("there is no local folder acme/nothing-of-that-name either")
