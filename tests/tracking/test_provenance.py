"""Provenance of a run: facts about a real git repository, the code files to save, and XLA dumps."""

import logging
import os
import subprocess
import sys

import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.tracking import provenance
from lmtrain.tracking.provenance import (
    code_files,
    code_root,
    find_xla_dumps,
    git_facts,
    remote_with_credentials,
    xla_dump_folder,
)


def git(place, *arguments):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=trunk"]
    done = subprocess.run(["git", "-C", place, *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home folder without git settings, and no repository around the test's folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return folder


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit of two files and no changes."""
    root = tmp_path / "our code"
    (root / "within").mkdir(parents=True)
    git(root, "init", "--quiet")
    (root / "main.py").write_text("print(1)\n")
    (root / "within" / "weights.bin").write_bytes(bytes(range(256)))
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "one")
    return root


@pytest.fixture
def logged(caplog):
    """`logged()` returns the messages logged so far."""
    caplog.set_level(logging.INFO, "lmtrain")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def script(repository, monkeypatch):
    """The main script of this process is in the repository."""
    monkeypatch.setattr(sys, "argv", [str(repository / "main.py")])
    return repository


def names(root, secrets=()):
    return {os.path.relpath(path, root) for path in code_files(str(root), secrets)}


def test_commit_branch_remote_and_whether_files_changed(script):
    git(script, "remote", "add", "origin", "https://me:p@ss:word@example.org/team/code.git")
    commit = git(script, "rev-parse", "HEAD")
    facts = {"commit": commit, "branch": "trunk", "changed": False, "remote": "https://example.org/team/code.git"}
    (script / "scratch.txt").write_text("not git's")
    assert git_facts() == facts
    (script / "main.py").write_text("print(2)\n")
    git(script, "checkout", "--quiet", "--detach")
    assert git_facts() == facts | {"branch": None, "changed": True}


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://token@example.org/a.git", "https://example.org/a.git"),
        ("ssh://git@example.org:22/a@b.git", "ssh://example.org:22/a@b.git"),
        ("git@example.org:team/a.git", "git@example.org:team/a.git"),
    ],
)
def test_only_the_credentials_of_a_remote_are_removed(script, monkeypatch, url, kept):
    monkeypatch.chdir(script)
    assert remote_with_credentials() is None
    git(script, "remote", "add", "origin", url)
    assert git_facts()["remote"] == kept
    assert remote_with_credentials() == (None if kept == url else kept)


def test_reading_a_repository_takes_no_lock(script):
    os.utime(script / "main.py", (1, 1))  # git status would refresh the index because of this
    index = script / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    assert git_facts()["changed"] is False
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


@pytest.mark.parametrize("lacks", ["a repository", "the folder", "git", "time"])
def test_without_a_repository_or_git_there_are_no_facts_and_no_code(script, tmp_path, monkeypatch, logged, lacks):
    monkeypatch.chdir(tmp_path)
    if lacks == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif lacks == "time":
        monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.0)
    else:
        folder = tmp_path if lacks == "a repository" else tmp_path / "none"
        monkeypatch.setattr(sys, "argv", [str(folder / "main.py")])
    assert (git_facts(), code_root(), remote_with_credentials()) == (None, None, None)
    assert logged() == []


def test_the_repository_of_the_main_script_takes_precedence_over_the_current_folder(repository, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    monkeypatch.chdir(other)
    for main, root in (
        (repository / "within" / "train.py", repository),
        (tmp_path / "train.py", other),
        (repository / "lmtrain", other),  # the installed command
        (repository / "lmtrain" / "__main__.py", other),
    ):
        monkeypatch.setattr(sys, "argv", [str(main)])
        assert code_root() == str(root)


def test_the_code_is_what_git_tracks_without_links_environment_files_and_secrets(repository, tmp_path, logged):
    (tmp_path / "outside").write_text("theirs")
    (repository / "link").symlink_to(tmp_path / "outside")
    for name in (".env", ".env.local", "within/prod.env", "gone.py", "ü name.py"):
        (repository / name).write_text("x")
    (repository / "within" / "run.yaml").write_text("api_key: committed-key\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "two")
    (repository / "gone.py").unlink()
    (repository / "new.py").write_text("staged")
    git(repository, "add", "new.py")
    (repository / "scratch.txt").write_text("not git's")
    kept = {"main.py", "within/weights.bin", "within/run.yaml", "new.py", "ü name.py"}
    assert names(repository) == kept
    (repository / "main.py").write_text("login('changed-key')\n")  # the files as they are, not as committed
    assert logged() == []
    assert names(repository, ["committed-key", "changed-key", "short"]) == kept - {"main.py", "within/run.yaml"}
    (warning,) = logged()
    assert warning.startswith("main.py, within/run.yaml: ")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--xla_cpu_use_x=true --xla_dump_to=/a/b --xla_dump_hlo_as_text", "/a/b"),
        ("--xla_dump_to='a b/c'", "a b/c"),
        ("--xla_dump_to=one --xla_dump_to=two", "two"),
    ],
)
def test_the_folder_of_xla_dumps_is_read_from_xla_flags(monkeypatch, flags, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert xla_dump_folder() == expected


@pytest.mark.parametrize("flags", [None, "--xla_dump_to", "--xla_dump_to=", "xla_dump_to=a"])
def test_without_the_flag_it_is_a_user_error(monkeypatch, flags):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(UserError, match=r"trainer\.tracker\.save_xla_dumps"):
        xla_dump_folder()


def test_missing_dumps_are_logged(tmp_path, monkeypatch, logged):
    dumps = tmp_path / "dumps"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={dumps}")
    assert find_xla_dumps() is None
    dumps.mkdir()
    assert find_xla_dumps() is None
    (dumps / "module_0001.txt").write_text("HloModule")
    assert find_xla_dumps() == str(dumps)
    assert [str(dumps) in warning for warning in logged()] == [True] * 2
