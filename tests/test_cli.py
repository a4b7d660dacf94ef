"""The `lmtrain` program: help, version, commands, exit codes, and imports."""

import os
import signal
import subprocess
import sys

import pytest

from lmtrain import __version__
from lmtrain.cli import VERBS

SLOW = ["jax", "flax", "optax", "orbax", "grain", "numpy", "transformers", "tokenizers", "wandb", "tensorboardX"]

IMPORTS = f"""
import sys
from lmtrain.cli import main
try:
    main(sys.argv[1:])
except SystemExit as exit:
    assert exit.code == 0, exit.code
print("imported:", *[name for name in {SLOW} if name in sys.modules])
"""


def test_help_names_every_command_and_exits_with_0(lmtrain):
    done = lmtrain("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == list(VERBS)
    assert lmtrain("-h").stdout == lmtrain("help").stdout == done.stdout


def test_no_command_shows_the_help_and_exits_with_2(lmtrain):
    done = lmtrain()
    assert done.returncode == 2
    assert "usage: lmtrain " in done.stdout


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(lmtrain, flag):
    done = lmtrain(flag)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lmtrain {__version__}\n", "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help(lmtrain, verb):
    done = lmtrain(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: lmtrain {verb}")


@pytest.mark.parametrize(
    ("verb", "advice"),
    [
        ("trian", "did you mean 'train'?"),
        ("Train", "did you mean 'train'?"),
        ("export_hf", "did you mean 'export-hf'?"),
        ("zzz", f"one of: {', '.join(VERBS)}"),
        ("", f"one of: {', '.join(VERBS)}"),
        ("--trainer.seed", f"one of: {', '.join(VERBS)}"),
    ],
)
def test_an_unknown_command_is_an_error_with_advice(lmtrain, verb, advice):
    done = lmtrain(verb)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lmtrain: error: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"{verb!r}; {advice}\n")


def test_a_user_error_is_one_message_without_traceback_and_exits_with_2(lmtrain):
    done = lmtrain("config", "check", "gpt2_nan")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lmtrain: error: gpt2_nan: no such config; did you mean 'gpt2_nano'?\n"


@pytest.mark.parametrize("folder", ["tiny.yaml", "tiny.yaml/logs"])
def test_a_log_folder_that_cannot_be_created_is_a_user_error(lmtrain, settings, write_config, folder):
    write_config(settings)
    done = lmtrain("train", "tiny.yaml", "--trainer.log_dir", folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"trainer.log_dir: {folder}" in done.stderr


def test_a_valid_config_exits_with_0(lmtrain):
    assert lmtrain("config", "check", "gpt2_nano").returncode == 0


def test_a_closed_pipe_prints_no_traceback(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lmtrain", "config", "show", "gpt2_nano"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_prints_a_message_without_traceback_and_exits_with_75(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)  # reading it blocks until someone writes
    (tmp_path / "main.yaml").write_text("model: !include pipe.yaml\n")
    command = [sys.executable, "-m", "lmtrain", "config", "check", "main.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    with open(pipe, "w"):  # returns when the command has opened its end
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 75
    assert stderr == "lmtrain: interrupted; run the same command again to resume\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config", "check", "gpt2_nano"]])
def test_quick_commands_import_nothing_slow(tmp_path, arguments):
    command = [sys.executable, "-c", IMPORTS, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"
