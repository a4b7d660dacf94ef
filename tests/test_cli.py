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
from lmtrain.runtime.errors import RunError

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
    assert lmtrain(code=2).stdout == done.stdout  # no command


def test_version(lmtrain):
    done = lmtrain("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lmtrain {__version__}\n", "")
    assert lmtrain("-V").stdout == done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help(lmtrain, verb):
    assert lmtrain(verb, "--help", code=0).stdout.startswith(f"usage: lmtrain {verb}")


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


def test_an_error_of_the_machine_is_one_message_without_traceback_and_exits_with_1(run_cli, monkeypatch):
    def fail(argv):
        raise RunError("no memory")

    monkeypatch.setattr("lmtrain.commands.config.run", fail)
    done = run_cli("config", "check", "gpt2_nano")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "lmtrain: error: no memory\n")


@pytest.mark.parametrize("folder", ["tiny.yaml", "tiny.yaml/logs"])
def test_a_log_folder_that_cannot_be_created_is_a_user_error(lmtrain, settings, write_config, folder):
    write_config(settings)
    assert f"trainer.log_dir: {folder}" in lmtrain("train", "tiny.yaml", "--trainer.log_dir", folder, code=2).stderr


def test_a_current_folder_that_has_been_deleted_is_a_user_error(tmp_path):
    script = (
        "import os, sys; os.rmdir(os.getcwd()); from lmtrain.cli import main; main(['config', 'check', 'gpt2_nano'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lmtrain: error: the working folder was deleted")
    assert done.stderr.count("\n") == 1


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
    assert stderr == "SIGINT: exiting immediately; run the same command again\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config", "check", "gpt2_nano"]])
def test_quick_commands_import_nothing_slow(tmp_path, arguments):
    command = [sys.executable, "-c", IMPORTS, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


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
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 1, "Disk quota exceeded; "),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2, "a: Permission denied$"),
        (OSError(errno.EROFS, "Read-only file system", "a"), 2, "a: Read-only file system$"),
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
    assert "working folder was deleted" in capsys.readouterr().err
