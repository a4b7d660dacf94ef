"""Atomic writes of local files."""

import os
import subprocess
import sys
import threading

import pytest

from lmtrain.runtime.storage import UNUSED_SECONDS, remove_temporaries, write_atomically

KILLED_WHILE_WRITING = """
import os, signal, sys
from lmtrain.runtime import storage as files

def die(number):
    os.kill(os.getpid(), signal.SIGKILL)

files.os.fsync = die
files.write_atomically(sys.argv[1], b"new" * 1000)
"""


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 1_500_000], ids=len)
def test_the_bytes_are_written_and_no_other_files(tmp_path, content):
    path = tmp_path / "ü file"
    path.write_bytes(b"old")
    write_atomically(str(path), content)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["ü file"]


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(path)], timeout=300)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    assert len(os.listdir(tmp_path)) == 2
    remove_temporaries(str(tmp_path))
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_reader_never_sees_a_partial_file(tmp_path):
    path, stop, seen = tmp_path / "a", threading.Event(), set()
    write_atomically(str(path), b"0" * 500_000)

    def read():
        while not stop.is_set():
            content = path.read_bytes()
            seen.add((len(content), len(set(content))))

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(40):
        write_atomically(str(path), b"%d" % (turn % 10) * 500_000)
    stop.set()
    reader.join()
    assert seen == {(500_000, 1)}


def test_where_others_may_write_only_files_are_removed_that_have_not_changed_for_long(tmp_path):
    names = ("a.tmp-1", "a.tmp-2", "folder.tmp-1/b", "folder.tmp-2/b", "other.tmp-1", "b.tmp", "tmp-1")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in ("a.tmp-1", "folder.tmp-1", "other.tmp-1"):
        os.utime(tmp_path / name, (1, 1))
    remove_temporaries(str(tmp_path), "a", UNUSED_SECONDS)
    assert sorted(os.listdir(tmp_path)) == [
        *("a.tmp-2", "b.tmp", "folder.tmp-1", "folder.tmp-2", "other.tmp-1", "tmp-1")
    ]
    remove_temporaries(str(tmp_path), age=UNUSED_SECONDS)
    assert sorted(os.listdir(tmp_path)) == ["a.tmp-2", "b.tmp", "folder.tmp-2", "tmp-1"]
