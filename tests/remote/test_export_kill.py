"""An export whose process is killed, before each change of its files, is repeated as if nothing had happened."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from remote.killed_export import ORIGIN, export_step_4
from remote.proxy import Reply, Request

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import delete_file, list_files, list_names, read_bytes, write_bytes
from lmtrain.weights.export_folder import (
    PARTIAL,
    ModelOrigin,
    check_output,
    check_same_run,
    is_missing,
    remove_interrupted_steps,
)

TESTS = Path(__file__).parent.parent
KILLED = -signal.SIGKILL


def contents(folder: str) -> dict[str, bytes]:
    return {name: read_bytes(f"{folder}/{name}") for name in list_files(folder)}


def resume(folder: str) -> None:
    """What a run does that resumes after step 4; the killed process has not exported it before."""
    remove_interrupted_steps(folder)
    if is_missing(folder, 4):
        export_step_4(folder, 2.0)


def export_again(folder: str) -> None:
    """What `export-hf` does; the killed process has replaced an earlier export."""
    check_output(f"{folder}/step-4")
    check_same_run(f"{folder}/step-4", ORIGIN)
    export_step_4(folder, 2.0)


@contextmanager
def exporting(*modules: str) -> Iterator[Callable[[str, int], tuple[int, Callable[[], int]]]]:
    """`start(folder, N)` exports in a forked process. -> its id, and a function that returns its exit code"""
    command = [sys.executable, "-m", "remote.killed_export", *modules]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": path, "GRPC_ENABLE_FORK_SUPPORT": "0"}  # it waits before a fork
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:

        def start(folder: str, number: int) -> tuple[int, Callable[[], int]]:
            process.stdin.write(f"{folder} {number}\n")
            process.stdin.flush()
            return int(process.stdout.readline()), lambda: int(process.stdout.readline())

        yield start


@pytest.mark.parametrize("repeat", [resume, export_again])
def test_a_killed_export_to_a_folder_is_repeated(repeat, tmp_path):
    export_step_4(str(tmp_path / "undisturbed"), 2.0)
    expected = contents(str(tmp_path / "undisturbed"))
    code, number = KILLED, 0
    with exporting() as start:
        while code == KILLED:
            number += 1
            folder = str(tmp_path / str(number))
            if repeat is export_again:
                export_step_4(folder, 1.0)
            _, wait = start(folder, number)
            code = wait()
            repeat(folder)
            assert contents(folder) == expected, number
            assert os.listdir(folder) == ["step-4"]
    assert code == 0
    assert number >= 10


@pytest.mark.long  # the suite kills exports to a folder
@pytest.mark.parametrize("scheme", ["gs", "s3"], indirect=True)
@pytest.mark.parametrize("repeat", [export_again, resume])
def test_a_killed_export_to_a_bucket_is_repeated(new_store, scheme, proxy, repeat, tmp_path):
    export_step_4(str(tmp_path), 2.0)
    expected = contents(str(tmp_path))
    code, number = KILLED, 0
    with exporting({"gs": "gcsfs", "s3": "s3fs"}[scheme]) as start:
        while code == KILLED:
            number += 1
            store = new_store(scheme)
            if repeat is export_again:
                export_step_4(store.url, 1.0)
            changes, process, last = [], queue.SimpleQueue(), number

            def kill(request: Request) -> Reply | None:
                if request.method in ("GET", "HEAD"):
                    return None
                changes.append(request)  # noqa: B023
                if len(changes) == last:  # noqa: B023
                    os.kill(process.get(), signal.SIGKILL)  # noqa: B023
                return None if len(changes) < last else Reply(500)  # noqa: B023

            proxy.refuse = kill
            started, wait = start(store.url, 0)
            process.put(started)
            code = wait()
            proxy.refuse = lambda request: None
            repeat(store.url)
            assert store.contents() == expected, changes
    assert code == 0
    assert number >= 10


def test_an_interrupted_export_to_a_url_is_recognized_and_other_folders_are_not_deleted():
    folder = "memory://interrupted"
    export_step_4(folder, 1.0)
    complete = contents(folder)
    write_bytes(f"{folder}/step-4/{PARTIAL}", read_bytes(f"{folder}/step-4/config.json"))
    delete_file(f"{folder}/step-4/config.json")
    for name in ("step-4.tmp-1/model.safetensors", "step-4.tmp-2/photo.png", "step-5/model.safetensors"):
        write_bytes(f"{folder}/{name}", b"")
    assert is_missing(folder, 4)
    with pytest.raises(UserError, match="holds an export of the run run, but this one is of another"):
        check_same_run(f"{folder}/step-4", ModelOrigin("another", "data"))
    with pytest.raises(UserError, match="not empty and not an lmtrain export"):
        check_output(f"{folder}/step-5")
    resume(folder)
    others = {"step-4.tmp-2/photo.png": b"", "step-5/model.safetensors": b""}
    assert contents(folder).keys() == complete.keys() | others.keys()
    assert not is_missing(folder, 4)
    write_bytes(f"{folder}/step-4/{PARTIAL}", read_bytes(f"{folder}/step-4/config.json"))
    write_bytes(f"{folder}/step-4/photo.png", b"")
    with pytest.raises(UserError, match="also holds photo"):
        check_output(f"{folder}/step-4")
    remove_interrupted_steps(folder)
    assert "photo.png" in list_names(f"{folder}/step-4")
