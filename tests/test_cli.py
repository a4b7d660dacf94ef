"""The `lmtrain` program: help, version, commands, exit codes, and imports."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from lmtrain import __version__
from lmtrain.cli import VERBS, main

SLOW = ["jax", "flax", "optax", "orbax", "grain", "numpy", "transformers", "tokenizers", "wandb", "tensorboardX"]

IMPORTS = f"""
import sys
from lmtrain.cli import main
for arguments in (["--help"], ["--version"], ["config", "check", "gpt2_nano"]):
    try:
        main(arguments)
    except SystemExit as exit:
        assert exit.code == 0, exit.code
    print("imported:", *[name for name in {SLOW} if name in sys.modules])
import importlib
from lmtrain.cli import VERBS
for verb, _ in VERBS.values():  # a mistake in a command line is found before JAX is loaded
    importlib.import_module(f"lmtrain.commands.{{verb}}")
print("imported:", *[name for name in {SLOW[:5] + SLOW[6:]} if name in sys.modules])
"""


def test_help_names_every_command_and_the_version_is_printed(run_cli):
    done = run_cli("--help", code=0)
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == list(VERBS)
    assert run_cli("-h").stdout == run_cli("help").stdout == done.stdout
    assert run_cli(code=2).stdout == done.stdout  # no command
    assert run_cli("--version", code=0).stdout == run_cli("-V").stdout == f"lmtrain {__version__}\n"
    for verb in VERBS:
        assert run_cli(verb, "--help", code=0).stdout.startswith(f"usage: lmtrain {verb}")


def test_help_lists_sections_and_the_settings_of_one(run_cli):
    short = run_cli("train", "--help", code=0).stdout
    assert short.count("\n") < 40
    assert all(f"\n  {name} " in short for name in ("top", "data", "trainer", "optimizer"))
    for arguments in (("train", "--help", "trainer"), ("help", "train", "trainer")):
        listed = run_cli(*arguments, code=0).stdout
        assert ("--trainer.train_batch_size\n" in listed, "--data.id\n" in listed) == (True, False)
    every = run_cli("preprocess", "-h", "all", code=0).stdout
    assert ("--trainer.seed\n" in every, "--hf_save_path\n" in every) == (True, True)
    assert "trainer?" in run_cli("train", "--help", "traner", code=2).stderr


def test_flags_take_dashes_and_underscores_alike(run_cli):
    shown = run_cli("config", "show", "gpt2_nano", "--trainer.num-train-steps", "7", code=0).stdout
    assert "num_train_steps: 7" in shown
    weights = ("--data.configs.my-code", "{train_urls: [x]}", "--objective", "{type: weighted_cross_entropy}")
    shown = run_cli("config", "show", "gpt2_nano", *weights, "--objective.source-weights.my-code", "2", code=0).stdout
    assert "my-code: 2.0" in shown
    refused = run_cli("export_hf", code=2).stderr + run_cli("export-hf", "gpt2_nano", code=2).stderr
    assert "export-hf" in refused
    assert "--base_model" in run_cli("export-hf", "gpt2_nano", "--output", "x", "--base-model", "y", code=2).stderr


def test_a_message_names_its_setting_once(run_cli):
    done = run_cli("config", "check", "gpt2_nano", "--trainer.seed", "x", "--data.configs", "{a b: {}}", code=2)
    assert done.stderr.count("trainer.seed") == 1
    assert "should" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["trian"], "did you mean 'train'?"),
        (["--trainer.seed"], f"one of: {', '.join(VERBS)}"),
        (["config", "check", "gpt2_nan"], "did you mean 'gpt2_nano'?"),
    ],
)
def test_a_user_error_is_one_line_with_advice_and_exits_with_2(run_cli, arguments, advice):
    done = run_cli(*arguments, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("lmtrain: error: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"; {advice}\n")


def test_a_log_folder_that_cannot_be_created_is_a_user_error(run_cli, settings, write_config):
    write_config(settings)
    for folder in ("tiny.yaml", "tiny.yaml/logs"):
        refused = run_cli("train", "tiny.yaml", "--trainer.log_dir", folder, code=2).stderr
        assert f"trainer.log_dir: {folder}" in refused


def test_a_closed_pipe_prints_no_traceback(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lmtrain", "config", "show", "gpt2_nano"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_in_any_command_prints_a_message_without_traceback_and_exits_with_75(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:  # never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}/main.yaml"
        command = [sys.executable, "-m", "lmtrain", "config", "check", url]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        connection, _ = server.accept()  # returns when the command asks for its config
        with connection:
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=300)
    assert process.returncode == 75
    assert stderr.startswith("SIGINT: ")
    assert stderr.count("\n") == 1


def test_quick_commands_import_nothing_slow(tmp_path):
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert found == ["imported:"] * 4


def _chained() -> Exception:
    error = RuntimeError("failed to start a worker")
    error.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files", "a/b"), 1, "a/b: Too many open files; .*ulimit -n"),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), 1, ".*ulimit -n"),
        (_chained(), 1, "Too many open files; .*ulimit -n"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 1, "a: No space left on device; "),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2, "a: Permission denied$"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "https://me:planted@h/a"), 2, "https://...@h/a: "),
    ],
)
def test_a_limit_of_the_machine_or_an_unusable_path_is_one_message(monkeypatch, capsys, error, code, message):
    def fail(argv):
        raise error

    monkeypatch.setattr("lmtrain.commands.checkpoint.run", fail)
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "list", "a"])
    printed = capsys.readouterr().err
    assert caught.value.code == code
    assert re.match(f"lmtrain: error: {message}", printed)
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["inference"], "lmtrain generate"),
        (["merge-lora"], "export-hf --merge"),
        (["train", "gpt2_nano", "--use_peft"], "set lora"),
        (["train", "gpt2_nano", "--lr", "1e-4"], "optimizer.learning_rate"),
        (["preprocess", "gpt2_nano", "--debug"], "--show 2"),
    ],
)
def test_commands_and_flags_of_other_systems_lead_to_ours(capsys, argv, named):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_a_bug_is_a_traceback(monkeypatch, capsys):
    def fail(argv):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "a")

    monkeypatch.setattr("lmtrain.commands.checkpoint.run", fail)
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "list", "a"])
    assert caught.value.code == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_working_folder_that_was_deleted_is_a_user_error(monkeypatch, capsys, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "list", "a"])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("lmtrain: error: the working folder was deleted")
    assert printed.count("\n") == 1
