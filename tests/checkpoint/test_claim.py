"""Exclusive access: only one run with the same id saves at a time."""

import json
import os
import signal
import subprocess
import sys

import pytest

from lmtrain.checkpoint.run_folder import Claim, TakenOverError
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import delete_folder, join, list_names, read_json, write_bytes

HOLD = """
import sys
from lmtrain.checkpoint.run_folder import Claim

claim = Claim(sys.argv[1])
print("claimed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has claimed `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def claim(folder):
    """`claim()` claims the folder (at a path, then at a URL); all claims are released at the end."""
    if "://" not in folder:
        os.makedirs(folder)
    claims = []

    def make():
        claims.append(Claim(folder))
        return claims[-1]

    yield make
    for made in claims:
        made.release()


def test_a_second_process_is_refused_with_the_process_that_holds_the_lock(holder, tmp_path):
    with pytest.raises(UserError, match=rf"{tmp_path}: .*process {holder.pid} on "):
        Claim(str(tmp_path))
    assert read_json(str(tmp_path / "attempt.json"))["process"] == holder.pid  # its marker is unchanged


def test_a_killed_process_holds_no_claim(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert sorted(os.listdir(tmp_path)) == ["attempt.json", "lock"]
    claim = Claim(str(tmp_path))
    claim.check()
    assert read_json(str(tmp_path / "attempt.json"))["process"] == os.getpid()
    claim.release()
    assert os.listdir(tmp_path) == []


def test_a_claim_writes_a_marker_until_it_is_released_once_or_twice(claim, folder):
    made = claim()
    mark = read_json(join(folder, "attempt.json"))
    assert (mark["process"], sorted(mark)) == (os.getpid(), ["host", "id", "process", "started"])
    made.check()
    for _ in range(2):
        made.release()
        assert list_names(folder) == []
    made = claim()
    delete_folder(folder)
    made.release()
    assert list_names(folder) == []


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_at_a_url_the_newest_start_wins_and_older_ones_stay_taken_over(claim, folder):
    first, second = claim(), claim()
    second.check()
    with pytest.raises(TakenOverError, match=f"process {os.getpid()}"):
        first.check()
    first.release()
    second.check()
    assert list_names(folder) == ["attempt.json"]  # the marker of the second run
    third = claim()
    for older in (first, second):
        with pytest.raises(TakenOverError):
            older.check()
    third.check()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}"], ids=str)
def test_an_unreadable_marker_does_not_take_over(claim, folder, content):
    made = claim()
    write_bytes(join(folder, "attempt.json"), content)
    made.check()


def test_a_marker_of_another_machine_takes_over_at_a_path_too(claim, folder):
    """On a disk shared by several machines, locks may not be visible to the others."""
    made = claim()
    mark = {"id": "another", "host": "there", "process": 7, "started": "now"}
    write_bytes(join(folder, "attempt.json"), json.dumps(mark).encode())
    with pytest.raises(TakenOverError, match=r"now on there .*process 7"):
        made.check()
    made.release()
    assert read_json(join(folder, "attempt.json")) == mark
