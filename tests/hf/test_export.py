"""Writing a Hugging Face folder: whole or not at all."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from conftest import TOKENIZER
from safetensors.numpy import load_file

from lmtrain.config.errors import UserError
from lmtrain.hf import export
from lmtrain.hf.export import write_hf_folder
from lmtrain.hf.tokenizer import load_tokenizer

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3) / 7, "b": np.ones(3, np.float32)}
CONFIG = {"model_type": "gpt2"}


def write(folder, dtype: str = "float32") -> None:
    write_hf_folder(str(folder), TENSORS, CONFIG, load_tokenizer(str(TOKENIZER)), dtype)


def test_the_folder_holds_weights_configs_and_tokenizer(tmp_path):
    write(tmp_path / "model")
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(tmp_path / "model")) == files
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in found.items()} == {n: t.tobytes() for n, t in TENSORS.items()}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config == CONFIG | {"dtype": "float32", "torch_dtype": "float32"}


def test_bfloat16_rounds_to_nearest(tmp_path):
    write(tmp_path / "model", "bfloat16")
    found = load_file(tmp_path / "model" / "model.safetensors")
    np.testing.assert_array_equal(found["a"], TENSORS["a"].astype(ml_dtypes.bfloat16))


def test_an_earlier_export_is_replaced(tmp_path):
    write(tmp_path / "model")
    (tmp_path / "model" / "stale.txt").write_text("from before")
    write(tmp_path / "model")
    assert not (tmp_path / "model" / "stale.txt").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "photo.png").write_text("precious")
    with pytest.raises(UserError, match="not empty and holds no earlier export"):
        write(tmp_path)
    assert os.listdir(tmp_path) == ["photo.png"]


def test_a_file_in_the_way_is_left_alone(tmp_path):
    (tmp_path / "model").write_text("precious")
    with pytest.raises(UserError, match="there is a file of that name"):
        write(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "precious"


def test_a_write_that_fails_leaves_the_earlier_export_and_nothing_else(tmp_path, monkeypatch):
    write(tmp_path / "model")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(export, "write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "model", "bfloat16")
    assert os.listdir(tmp_path) == ["model"]
    assert load_file(tmp_path / "model" / "model.safetensors")["a"].dtype == np.float32


def test_weights_that_read_back_differently_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "load_file", lambda path: {name: tensor + 1 for name, tensor in TENSORS.items()})
    with pytest.raises(OSError, match="reads back with other values"):
        write(tmp_path / "model")
    assert os.listdir(tmp_path) == []
