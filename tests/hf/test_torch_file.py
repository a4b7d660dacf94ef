"""Weight files of torch: the tensors of save_pretrained, and nothing else."""

import os
import sys
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch
from hf.conftest import to_torch

from lmtrain.hf.weight_files import TorchWeights
from lmtrain.runtime.errors import UserError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array(2.5, np.float16),
    "d": np.zeros((0, 3), np.float32),
}
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
    assert weights.shapes == {name: array.shape for name, array in TENSORS.items()}
    assert weights.dtypes == {name: array.dtype.name for name, array in TENSORS.items()}
    for name, array in TENSORS.items():
        found = weights.read(name)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


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
    assert refusal(path).startswith(f"{path}: holds more than tensors, or is corrupt")
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
    torch.load(path, weights_only=False)["b"].close()  # this runs the code
    assert (tmp_path / "was run").exists()


@pytest.mark.parametrize(
    "content",
    [{"a": TWO, "epoch": 3}, {"model": {"a": TWO}}, [TWO], TWO, {"a": None}, {0: TWO}],
    ids=["number", "nested", "list", "tensor", "none", "named by a number"],
)
def test_content_other_than_a_map_of_names_to_tensors_is_refused(path, content):
    torch.save(content, path)
    assert refusal(path) == f"{path}: not a map of names to tensors"


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04" + bytes(90), None]
)
def test_an_invalid_or_truncated_file_is_an_error_with_its_name(path, content):
    if content is None:
        torch.save({"a": torch.zeros(5000)}, path)
        with open(path, "rb") as file:
            content, reason = file.read()[:9000], "torch cannot load it: "
    else:
        reason = ""
    with open(path, "wb") as file:
        file.write(content)
    assert refusal(path).startswith(f"{path}: {reason}")


def test_urls_are_refused(tmp_path):
    url = f"memory://{tmp_path}/pytorch_model.bin"
    assert refusal(url).startswith(f"{url}: ")
    assert "copy the folder first" in refusal(url)


def test_without_torch_the_package_is_named(path, monkeypatch):
    torch.save({"a": TWO}, path)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert f"{path}: requires torch: run `pip install torch`" in refusal(path)
