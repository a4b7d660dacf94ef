"""Provenance of a run: its code from a real git repository, and XLA dumps."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import threading

import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.tracking import provenance as keep
from lmtrain.tracking.config import JsonConfig, WandbConfig
from lmtrain.tracking.provenance import (
    Provenance,
    describe_repository,
    find_xla_dumps,
    keep_code,
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
def folder(tmp_path):
    return tmp_path / "logs" / "run-1" / "code"


@pytest.fixture
def logged(caplog):
    """`logged()` returns the messages logged so far."""
    caplog.set_level(logging.INFO, "lmtrain")
    return lambda: [record.getMessage() for record in caplog.records]


def change(repository):
    """One file changed, another changed and staged, a new one staged, and one untracked."""
    (repository / "main.py").write_text("print(2)\n")
    (repository / "within" / "weights.bin").write_bytes(bytes(range(255, -1, -1)))
    git(repository, "add", "within/weights.bin")
    (repository / "new.py").write_text("new\n")
    git(repository, "add", "new.py")
    (repository / "scratch.txt").write_text("not git's")


def files(place):
    """The files of a working tree, without .git."""
    paths = [path for path in place.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(place)): path.read_bytes() for path in paths}


def restore(folder, place):
    """Restore the saved code: the archive with the changes applied."""
    with tarfile.open(folder / "code.tar.gz") as archive:
        archive.extractall(place, filter="data")
    if (folder / "changes.diff").stat().st_size:
        git(place, "apply", str(folder / "changes.diff"))
    return files(place)


def test_commit_branch_remote_and_changed_files_are_recorded(repository, folder):
    git(repository, "remote", "add", "origin", "https://me:p@ss:word@example.org/team/code.git")
    assert keep_code(str(folder), str(repository)) == str(folder)
    expected = {
        "root": str(repository),
        "commit": git(repository, "rev-parse", "HEAD"),
        "branch": "trunk",
        "remote": "https://example.org/team/code.git",
        "changed": [],
    }
    assert json.loads((folder / "git.json").read_text()) == expected
    assert (folder / "changes.diff").read_bytes() == b""
    change(repository)
    git(repository, "checkout", "--quiet", "--detach")
    changed = [" M main.py", "A  new.py", "M  within/weights.bin", "?? scratch.txt"]
    assert describe_repository(str(repository)) == expected | {"branch": None, "changed": changed}


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://token@example.org/a.git", "https://example.org/a.git"),
        ("ssh://git@example.org:22/a@b.git", "ssh://example.org:22/a@b.git"),
        ("git@example.org:team/a.git", "git@example.org:team/a.git"),
        ("https://example.org/a.git", "https://example.org/a.git"),
        ("../other", "../other"),
    ],
)
def test_only_the_credentials_of_a_remote_are_removed(repository, monkeypatch, url, kept):
    monkeypatch.chdir(repository)
    assert remote_with_credentials() is None
    git(repository, "remote", "add", "origin", url)
    assert describe_repository(str(repository))["remote"] == kept
    assert remote_with_credentials() == (None if kept == url else kept)


def test_archive_and_changes_reproduce_the_code_that_was_run(repository, folder, tmp_path, logged):
    change(repository)
    keep_code(str(folder), str(repository / "within"), ["a-secret"])  # also from a subfolder
    expected = files(repository)
    del expected["scratch.txt"]
    assert restore(folder, tmp_path / "restored") == expected
    git(repository, "commit", "--quiet", "-a", "-m", "two")
    keep_code(str(folder), str(repository))  # a second start
    assert restore(folder, tmp_path / "again") == expected
    assert logged() == []


@pytest.mark.parametrize(
    "setting",
    ["color.ui=always", "diff.external=false", "diff.noprefix=true", "diff.mnemonicPrefix=true", "diff.b.textconv=wc"],
)
def test_changes_can_be_applied_with_any_git_settings_of_the_user(repository, folder, home, tmp_path, setting):
    change(repository)
    (repository / ".git" / "info" / "attributes").write_text("*.py diff=b\n")
    keep_code(str(folder), str(repository))
    expected = (folder / "changes.diff").read_bytes()
    subprocess.run(["git", "config", "--global", *setting.split("=")], check=True)
    keep_code(str(folder), str(repository))
    assert (folder / "changes.diff").read_bytes() == expected
    assert b"print(2)" in expected


def test_reading_a_repository_takes_no_lock(repository):
    os.utime(repository / "main.py", (1, 1))  # git status would refresh the index because of this
    index = repository / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    assert describe_repository(str(repository))["changed"] == []
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


def test_a_repository_without_a_commit_or_without_files_is_described(tmp_path, folder, logged):
    root = tmp_path / "empty"
    root.mkdir()
    git(root, "init", "--quiet")
    (root / "main.py").write_text("print(1)\n")
    git(root, "add", "main.py")
    assert keep_code(str(folder), str(root)) == str(folder)
    repository = json.loads((folder / "git.json").read_text())
    assert (repository["commit"], repository["branch"], repository["remote"]) == (None, "trunk", None)
    assert repository["changed"] == ["A  main.py"]
    assert sorted(os.listdir(folder)) == ["changes.diff", "git.json"]
    git(root, "reset", "--quiet")
    git(root, "commit", "--quiet", "--allow-empty", "-m", "one")
    assert keep_code(str(folder), str(root), ["some-secret"]) == str(folder)
    assert logged() == []


@pytest.mark.parametrize("lacks", ["a repository", "the folder", "git"])
def test_without_a_repository_or_git_nothing_is_saved_or_logged(
    tmp_path, repository, folder, monkeypatch, logged, lacks
):
    (tmp_path / "empty").mkdir()
    start = {"a repository": tmp_path / "empty", "the folder": tmp_path / "none", "git": repository}[lacks]
    if lacks == "git":
        monkeypatch.setenv("PATH", str(folder))
    assert keep_code(str(folder), str(start)) is None
    assert not folder.exists()
    assert logged() == []


@pytest.mark.parametrize("problem", ["git hangs", "the folder cannot be written"])
def test_code_that_cannot_be_saved_is_logged(repository, folder, monkeypatch, logged, problem):
    if problem == "git hangs":
        monkeypatch.setattr(keep, "_GIT_SECONDS", 0.0)
    else:
        folder.parent.mkdir(parents=True)
        folder.write_text("in the way")
    assert keep_code(str(folder), str(repository)) is None
    (warning,) = logged()
    assert warning.startswith("the code could not be saved with the run: ")
    assert warning.endswith("; training continues")


def test_a_large_repository_is_saved_without_its_files_which_is_logged(repository, folder, monkeypatch, logged):
    monkeypatch.setattr(keep, "_MAX_ARCHIVE_BYTES", len("print(1)\n") + 256 - 1)
    change(repository)
    assert keep_code(str(folder), str(repository)) == str(folder)
    assert sorted(os.listdir(folder)) == ["changes.diff", "git.json"]
    (line,) = logged()
    assert line.endswith("not its files")
    monkeypatch.setattr(keep, "_MAX_ARCHIVE_BYTES", len("print(1)\n") + 256)
    keep_code(str(folder), str(repository))
    assert (folder / "code.tar.gz").exists()


def test_a_submodule_has_no_size_for_any_name(repository, folder):
    commit = git(repository, "rev-parse", "HEAD")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{commit},a blob within")
    git(repository, "commit", "--quiet", "-m", "with a submodule")
    assert keep_code(str(folder), str(repository)) == str(folder)


def test_the_repository_of_the_main_script_takes_precedence_over_the_current_folder(
    repository, folder, tmp_path, monkeypatch
):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    monkeypatch.chdir(other)

    def root(script):
        monkeypatch.setattr(sys, "argv", [str(script)])
        keep_code(str(folder))
        return json.loads((folder / "git.json").read_text())["root"]

    assert root(repository / "within" / "train.py") == str(repository)
    assert root(tmp_path / "train.py") == str(other)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--xla_dump_to=dumps", "dumps"),
        ("--xla_cpu_use_x=true --xla_dump_to=/a/b --xla_dump_hlo_as_text", "/a/b"),
        ("--xla_dump_to='a b/c'", "a b/c"),
        ('"--xla_dump_to=a b"', "a b"),
        ("--xla_dump_to=a=b", "a=b"),
        ("--xla_dump_to=one --xla_dump_to=two", "two"),
    ],
)
def test_the_folder_of_xla_dumps_is_read_from_xla_flags(monkeypatch, flags, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert xla_dump_folder() == expected


@pytest.mark.parametrize(
    "flags", [None, "", "--xla_dump_hlo_as_text", "--xla_dump_to", "--xla_dump_to=", "xla_dump_to=a"]
)
def test_without_the_flag_it_is_a_user_error(monkeypatch, flags):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(UserError, match="XLA_FLAGS=--xla_dump_to=FOLDER"):
        xla_dump_folder()


@pytest.fixture
def dumps(tmp_path, monkeypatch):
    """XLA's dump folder, with two files."""
    place = tmp_path / "dumps"
    (place / "within").mkdir(parents=True)
    (place / "module_0001.txt").write_text("HloModule")
    (place / "within" / "b.pb").write_bytes(b"\0\1")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={place}")
    return place


@pytest.mark.parametrize("empty", [True, False])
def test_missing_dumps_are_logged(dumps, logged, empty):
    assert find_xla_dumps() == str(dumps)
    shutil.rmtree(dumps)
    if empty:
        dumps.mkdir()
    assert find_xla_dumps() is None
    (warning,) = logged()
    assert str(dumps) in warning
    assert "compilation cache" in warning


class Recorder:
    def __init__(self):
        self.artifacts = []

    def artifact(self, path, name, kind):
        self.artifacts.append((path, name, kind, sorted(os.listdir(path))))


CODE, DUMPS = WandbConfig(), WandbConfig(save_code=False, save_xla_dumps=True)


@pytest.mark.parametrize(
    ("configs", "code", "xla"),
    [
        ([], False, False),
        ([JsonConfig()], False, False),
        ([WandbConfig(save_code=False)], False, False),
        ([CODE], True, False),
        ([JsonConfig(), DUMPS], False, True),
        ([CODE, DUMPS], True, True),
    ],
)
def test_only_what_wandb_trackers_enable_is_saved(repository, dumps, tmp_path, monkeypatch, configs, code, xla):
    monkeypatch.setattr(sys, "argv", [str(repository / "main.py")])
    folder, recorder = tmp_path / "logs" / "run-1", Recorder()
    provenance = Provenance(configs, str(folder), "run-1", recorder)
    provenance.finish()
    expected = []
    if code:
        kept = ["changes.diff", "code.tar.gz", "git.json"]
        expected.append((str(folder / "code"), "run-1-code", "code", kept))
    if xla:
        kept = ["module_0001.txt", "within"]
        expected.append((str(dumps), "run-1-xla-dumps", "xla-dumps", kept))
    assert recorder.artifacts == expected
    assert folder.exists() == code


def test_missing_code_and_dumps_are_not_passed_to_trackers(tmp_path, monkeypatch, dumps):
    shutil.rmtree(dumps)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    Provenance([CODE, DUMPS], str(tmp_path / "logs"), "run-1", recorder).finish()
    assert recorder.artifacts == []


def test_code_is_saved_in_the_background_and_finish_waits_for_it(tmp_path, monkeypatch):
    gate, recorder = threading.Event(), Recorder()

    def slow(folder, secrets):
        assert gate.wait(300)
        os.makedirs(folder)
        return folder

    monkeypatch.setattr(keep, "keep_code", slow)
    provenance = Provenance([CODE], str(tmp_path / "logs"), "run-1", recorder)
    assert recorder.artifacts == []
    threading.Timer(0.05, gate.set).start()
    provenance.finish()
    assert [artifact[1] for artifact in recorder.artifacts] == ["run-1-code"]


def test_secrets_of_the_config_are_not_saved_with_the_code(repository, folder, logged):
    (repository / "within" / "run.yaml").write_text("api_key: committed-key\nlines: 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "two")
    (repository / "main.py").write_text("login('changed-key')\n")
    keep_code(str(folder), str(repository), ["committed-key", "changed-key", "short"])
    with tarfile.open(folder / "code.tar.gz") as archive:
        assert {member.name for member in archive if member.isfile()} == {"main.py", "within/weights.bin"}
    assert b"+login('***')" in (folder / "changes.diff").read_bytes()
    assert [message for message in logged() if "secrets" in message] == [
        f"secrets of the config are masked in {folder}/changes.diff, so it may not apply",
        "within/run.yaml: not saved with the code, as they hold secrets of the config",
    ]
