"""`lmtrain generate`: command lines that are refused before a model is loaded."""

import os

import pytest


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny.yaml"], "--prompt or --chat is required"),
        (["--prompt", "a"], "the following arguments are required: CONFIG"),
        (["--hf", "base", "--checkpoint", "x", "--prompt", "a"], "--hf and --checkpoint: choose one"),
        (["tiny.yaml", "--hf", "base", "--prompt", "a"], "remove CONFIG"),
        (["tiny.yaml", "--prompt", "a"], "no such folder; `lmtrain train` saves them"),
        (["tiny.yaml", "--prompt", "a", "--system", "b"], "--system: requires --chat"),
        (["tiny.yaml", "--prompt", "a", "--chat_template", "b"], "--chat_template: requires --chat"),
        (["tiny.yaml", "--prompt", "caf\udce9"], "--prompt: not UTF-8: "),
        (["tiny.yaml", "--chat", "--system", "caf\udce9"], "--system: not UTF-8: "),
        (["tiny.yaml", "--prompt", "a", "--max_new_tokens", "many"], "invalid int value: 'many'"),
        (["tiny.yaml", "--prompt", "a", "--temperature", "-1"], "argument --temperature: -1: expected 0 or more"),
    ],
)
def test_a_wrong_command_line(run_cli, settings, write_config, tmp_path, arguments, expected):
    write_config(settings)
    assert expected in run_cli("generate", *arguments, code=2).stderr
    assert os.listdir(tmp_path) == ["tiny.yaml"]
