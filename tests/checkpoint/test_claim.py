"""One run of an id saves at a time."""

import json
import os
import signal
import subprocess
import sys

import pytest

from lmtrain.checkpoint.claim import Claim, TakenOverError
from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import delete_folder, join, list_names, read_json, write_bytes

HOLD = """
import sys
from lmtrain.checkpoint.claim import Claim

claim = Claim(sys.argv[1])
print("claimed", flush=True)
sys.stdin.readline()
claim.release()
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has claimed `tmp_path`; it gives it back when it is written to."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def claim(folder):
    """`claim()` claims a folder at a path, and then at a URL; all are released in the end."""
    if "://" not in folder:
        os.makedirs(folder)
    claims = []

    def make():
        claims.append(Claim(folder))
        return claims[-1]

    yield make
    for made in claims:
        made.release()


def test_a_second_process_is_refused_and_told_who_the_first_is(holder, tmp_path):
    with pytest.raises(UserError, match="locked by another run with the same id") as caught:
        Claim(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert f"(process {holder.pid} on " in str(caught.value)
    assert read_json(str(tmp_path / "attempt.json"))["process"] == holder.pid  # it is not disturbed


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    claim = Claim(str(tmp_path))
    claim.check()
    assert read_json(str(tmp_path / "attempt.json"))["process"] == os.getpid()
    claim.release()


def test_what_is_given_back_can_be_claimed(holder, tmp_path):
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    assert os.listdir(tmp_path) == []
    Claim(str(tmp_path)).release()


def test_a_claim_leaves_its_mark_until_it_is_released_twice_too(claim, folder):
    made = claim()
    mark = read_json(join(folder, "attempt.json"))
    assert (mark["process"], sorted(mark)) == (os.getpid(), ["host", "id", "process", "started"])
    made.check()
    for _ in range(2):
        made.release()
        assert list_names(folder) == []


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_at_a_url_the_newest_start_wins(claim, folder):
    first, second = claim(), claim()
    second.check()
    with pytest.raises(TakenOverError, match=f"the same run was started again at .* \\(process {os.getpid()}\\)"):
        first.check()
    first.release()
    second.check()
    assert list_names(folder) == ["attempt.json"]  # the mark of the second


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_whoever_was_taken_over_stays_so_while_the_other_runs(claim):
    first, second = claim(), claim()
    third = claim()
    for older in (first, second):
        with pytest.raises(TakenOverError):
            older.check()
    third.check()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"id"', b"{}"], ids=str)
def test_a_mark_that_cannot_be_read_takes_nothing_over(claim, folder, content):
    made = claim()
    write_bytes(join(folder, "attempt.json"), content)
    made.check()


def test_a_mark_of_another_machine_counts_at_a_path_too(claim, folder):
    """On a disk that several machines share locks may not reach the others."""
    made = claim()
    mark = {"id": "another", "host": "there", "process": 7, "started": "now"}
    write_bytes(join(folder, "attempt.json"), json.dumps(mark).encode())
    with pytest.raises(TakenOverError, match=r"started again at now on there \(process 7\)"):
        made.check()
    made.release()
    assert read_json(join(folder, "attempt.json")) == mark


def test_a_folder_that_was_deleted_does_not_keep_a_run_from_its_end(claim, folder):
    made = claim()
    delete_folder(folder)
    made.release()
    assert list_names(folder) == []


def test_a_mark_is_left_when_the_lock_was_held_by_a_process_that_was_killed(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert sorted(os.listdir(tmp_path)) == ["attempt.json", "lock"]
    Claim(str(tmp_path)).release()
    assert os.listdir(tmp_path) == []
