"""Folders of exports: only an earlier export is replaced, and nothing else is deleted."""

import json
import os

import pytest

from lmtrain import __version__
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import list_names, write_bytes
from lmtrain.weights.export_folder import check_output


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"config.json": '{"model_type": "gpt2"}'}, "model"),  # such as the model that training started from
        ({"config.json": "no JSON"}, "model"),
        ({"photo.png": "precious"}, "model"),
        ({"config.json": json.dumps({"lmtrain_version": __version__}), "notes": ""}, "notes"),
    ],
)
@pytest.mark.parametrize("place", ["folder", "URL"])
def test_a_folder_with_other_content_is_not_replaced(tmp_path, place, files, named):
    folder = str(tmp_path / "model") if place == "folder" else f"memory://{tmp_path}/model"
    if place == "folder":
        os.mkdir(folder)
    for name, text in files.items():
        write_bytes(f"{folder}/{name}", text.encode())
    with pytest.raises(UserError, match=named):
        check_output(folder)
    assert list_names(folder) == sorted(files)


@pytest.mark.parametrize("output", ["../file", "../file/below", "", ".", "/"])
def test_invalid_outputs_are_user_errors(tmp_path, monkeypatch, output):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="--output"):
        check_output(output)
    assert (tmp_path / "file").read_text() == "precious"
