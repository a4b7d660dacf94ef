"""Folders of exports: only an earlier export is replaced, and nothing else is deleted."""

import json
import os

import pytest

from lmtrain import __version__
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import list_names, write_bytes
from lmtrain.weights.export_folder import check_output


@pytest.mark.parametrize(
    ("files", "message"),
    [
        # such as a project, or the model that training started from
        *(
            ({"config.json": text}, "not an lmtrain export")
            for text in ("{}", '{"model_type": "gpt2"}', "[]", "no JSON")
        ),
        ({"photo.png": "precious"}, "not empty and not an lmtrain export"),
        (
            {"config.json": json.dumps({"lmtrain_version": __version__}), "notes": ""},
            "also holds notes; move it away",
        ),
    ],
)
@pytest.mark.parametrize("place", ["folder", "URL"])
def test_a_folder_with_other_content_is_not_replaced(tmp_path, place, files, message):
    folder = str(tmp_path / "model") if place == "folder" else f"memory://{tmp_path}/model"
    if place == "folder":
        os.mkdir(folder)
    for name, text in files.items():
        write_bytes(f"{folder}/{name}", text.encode())
    with pytest.raises(UserError, match=message):
        check_output(folder)
    assert list_names(folder) == sorted(files)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("../file", "exists and is a file"),
        ("../file/below", "cannot be created: "),
        ("", "expected a folder or URL"),
        (".", "the current folder and / cannot be replaced"),
        ("/", "the current folder and / cannot be replaced"),
    ],
)
def test_invalid_outputs_are_user_errors(tmp_path, monkeypatch, output, message):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=f"--output.*: {message}"):
        check_output(output)
    assert (tmp_path / "file").read_text() == "precious"
