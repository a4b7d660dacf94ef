"""`lmtrain generate`: command lines that are refused before a model is loaded."""

import os
import re

import pytest


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny.yaml"], "--prompt, --prompts or --chat is required"),
        (["--hf", "base", "--checkpoint", "x", "--prompt", "a"], "--hf and --checkpoint: choose one"),
        (["tiny.yaml", "--hf", "base", "--prompt", "a"], "remove CONFIG"),
        (["tiny.yaml", "--prompt", "a"], "no such folder"),
        (["tiny.yaml", "--prompts", "none.txt"], "none.txt"),
        (["tiny.yaml", "--prompt", "a", "--prompts", "tiny.yaml"], "--prompts and --prompt"),
        (["tiny.yaml", "--chat", "--samples", "2"], "--samples: "),
        (["tiny.yaml", "--prompt", "a", "--system", "b"], "--system: "),
        (["tiny.yaml", "--prompt", "a", "--web"], "--web: requires --chat"),
        (["tiny.yaml", "--chat", "--web", "--prompt", "a"], "--web: .*--prompt"),
        (["tiny.yaml", "--chat", "--port", "1"], "--port: "),
        (["tiny.yaml", "--chat", "--web", "--parallel", "0"], "argument --parallel: "),
        (["tiny.yaml", "--prompt", "caf\udce9"], "--prompt: "),
        (["tiny.yaml", "--prompt", "a", "--temperature", "-1"], "argument --temperature: -1: "),
    ],
)
def test_a_wrong_command_line(run_cli, settings, write_config, tmp_path, arguments, expected):
    write_config(settings)
    assert re.search(expected, run_cli("generate", *arguments, code=2).stderr)
    assert os.listdir(tmp_path) == ["tiny.yaml"]
