"""Weights of a model in a folder: one or several files of safetensors or torch, and their errors."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import torch
from hf.conftest import to_torch
from safetensors.numpy import save

from lmtrain.hf.find_tokenizer import find_tokenizer
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.hf.weight_files import locate, open_weights, read_model_config, read_model_json
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import is_url, join, open_fs, write_bytes

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


def test_a_corrupt_or_missing_file_among_several_is_named(folder):
    save_sharded(folder, "safetensors", write_safetensors)
    write_bytes(join(folder, "model-three.safetensors"), b"not found\n")
    with pytest.raises(UserError, match=r"model-three\.safetensors: not a safetensors file"):
        open_weights(folder)
    fs, inside = open_fs(join(folder, "model-two.safetensors"))
    fs.rm(inside)
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert str(error.value).startswith(f"{folder}: model-two.safetensors is missing")


WITHOUT_MAP = [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": None}]
WITHOUT_NAMES = [{"weight_map": {"a": file}} for file in (3, None, ["model-one.safetensors"])]


@pytest.mark.parametrize("values", [*WITHOUT_MAP, *WITHOUT_NAMES], ids=str)
def test_an_index_without_a_map_of_names_is_refused(folder, values):
    save_index(folder, values)
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert str(error.value) == f"{folder}: model.safetensors.index.json has no weight_map"


@pytest.mark.parametrize("outside", ["../outside", "/outside", "part/../../outside", "memory://outside", "..\\outside"])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_an_index_that_names_a_file_outside_the_folder_is_refused(tmp_path, outside, ending):
    (tmp_path / "model" / "part").mkdir(parents=True)
    name = f"{outside}.{ending}"
    write_safetensors(str(tmp_path / f"outside.{ending}"), {"a": TENSORS["a"]})
    stem = "model" if ending == "safetensors" else "pytorch_model"
    save_index(tmp_path / "model", {"weight_map": {"a": name}}, f"{stem}.{ending}.index.json")
    with pytest.raises(UserError, match=r"index\.json names .*outside.*, which is not in the model's folder"):
        open_weights(str(tmp_path / "model"))


def test_an_index_may_name_files_in_a_folder_of_the_model(folder):
    if not is_url(folder):
        os.mkdir(join(folder, "parts.1"))
    write_safetensors(join(folder, "parts.1", "a..b.safetensors"), {"a": TENSORS["a"]})
    save_index(folder, {"weight_map": {"a": "parts.1/a..b.safetensors"}})
    np.testing.assert_array_equal(open_weights(folder).read("a"), TENSORS["a"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b'{"weight_map": {"a"', ""), (b'{"a":' * 100_000, "nested too deeply")],
    ids=["cut", "deep"],
)
def test_an_index_or_config_that_is_not_json_is_refused(folder, content, reason):
    for name in ("config.json", "model.safetensors.index.json"):
        write_bytes(join(folder, name), content)
    for name, read in (("config.json", read_model_config), ("model.safetensors.index.json", open_weights)):
        with pytest.raises(UserError) as error:
            read(folder)
        assert str(error.value).startswith(f"{folder}: {name} is not valid JSON: {reason}")


# torch files


def test_torch_files_are_read_also_from_several(tmp_path):
    save_sharded(tmp_path, "bin", write_torch)
    assert_same(open_weights(str(tmp_path)))
    os.remove(tmp_path / "pytorch_model-one.bin")
    with pytest.raises(UserError, match=r"pytorch_model-one\.bin is missing"):
        open_weights(str(tmp_path))


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
        (lambda where: where.pop("d"), r"does not list d, which .*model-one\."),
        (lambda where: where.update(e=where["b"]), r"lists e for .*model-two\..*, which does not have it"),
        (lambda where: where.update(a=where["b"]), r"lists a for .*model-two\."),
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
    write = write_safetensors if ending == "safetensors" else write_torch
    save_sharded(tmp_path, ending, write)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    write(str(tmp_path / f"{stem}-two.{ending}"), {"a": TENSORS["a"], "b": TENSORS["b"]})
    with pytest.raises(UserError, match=rf"a is also in .*{stem}-"):
        open_weights(str(tmp_path))


# config.json, and the folder itself


def test_a_config_is_read(folder):
    write_bytes(join(folder, "config.json"), '{"model_type": "gpt2", "ü": null}'.encode())
    assert read_model_config(folder) == {"model_type": "gpt2", "ü": None}
    assert read_model_json(folder, "generation_config.json") is None
    assert locate(folder, "config.json") == join(folder, "config.json")
    assert locate(folder, "tokenizer.json") is None
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert str(error.value) == f"{folder}: there is no model.safetensors and no pytorch_model.bin"


def test_a_folder_without_a_config(folder):
    write_safetensors(join(folder, "model.safetensors"), TENSORS)
    with pytest.raises(UserError) as error:
        read_model_config(folder)
    assert str(error.value) == f"{folder}: there is no config.json; not a Hugging Face model"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(text, "is not valid JSON: ") for text in (b"{'a': 1}", b"", b"\xff\xfe{")]
    + [(text, "is not a JSON object") for text in (b"[]", b"3", b"null", b'"gpt2"')],
)
def test_a_config_that_is_not_an_object_is_an_error_with_its_name(folder, content, reason):
    write_bytes(join(folder, "config.json"), content)
    with pytest.raises(UserError) as error:
        read_model_config(folder)
    assert str(error.value).startswith(f"{folder}: config.json {reason}")


@pytest.mark.parametrize(
    ("ref", "reason"),
    [(ref, "no such folder") for ref in ("./exports/step-9", "/no/such folder", "~/nothing-of-that-name", "../x")]
    + [(ref, "no local folder") for ref in ("a b", "a/b/c")]
    + [("acme/nothing-of-that-name", "cannot be read from the hub")],
)
def test_a_missing_folder_is_an_error_and_also_one_that_is_no_hub_id(ref, reason, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=reason) as error:
        open_weights(ref)
    assert ref in str(error.value).splitlines()[0]
    if reason != "no such folder":
        assert str(error.value).endswith(f"there is no local folder {ref} either")


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
    with pytest.raises(UserError, match=rf"{name}.*a pointer of Git LFS.*git lfs pull"):
        load(str(tmp_path))
