"""`lmtrain export-hf`: command lines that are refused before a checkpoint is read."""

import os

import pytest

LORA = ["--lora.r", "2", "--initialize_from_hf", "base"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--output DIR or --upload owner/name is required"),
        (["--output", "x", "--merge"], "--merge: has an effect only on a run with lora"),
        (["--output", "x", "--merge", "--base_model", "b", *LORA], "--base_model: has an effect only on adapters"),
        (["--output", "base", *LORA], "--output base: is the folder of initialize_from_hf; choose another"),
    ],
)
def test_a_wrong_command_line(run_cli, settings, write_config, tmp_path, arguments, expected):
    write_config(settings)
    assert expected in run_cli("export-hf", "tiny.yaml", *arguments, code=2).stderr
    assert os.listdir(tmp_path) == ["tiny.yaml"]
