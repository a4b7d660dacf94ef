"""The JSON log: every metric once, however often a run is killed."""

import contextlib
import json
import math
import os
import subprocess
import sys

import pytest

from lmtrain.tracking.json_log import JsonLog


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def read(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "run.metrics.jsonl"


def write(path, restored, steps):
    log = JsonLog(str(path), restored)
    for step in steps:
        log.log({"train/loss": step / 4}, step)
    log.finish()


def test_one_object_for_each_log_with_its_step(path):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": 3.5, "eval/ünï/loss": 1e-30}, 1)
    log.log({}, 2)
    log.finish()
    assert read(path) == [{"step": 1, "train/loss": 3.5, "eval/ünï/loss": 1e-30}, {"step": 2}]


def test_samples_have_their_file_and_a_killed_run_repeats_none(path):
    log = JsonLog(str(path), 0)
    for step in (2, 4, 6):
        log.text({"Once": f" upon {step}", "a\nb": ""}, step)
    log.finish()
    resumed = JsonLog(str(path), 3)
    resumed.text({"Once": " again"}, 4)
    resumed.finish()
    found = read(path.parent / "run" / "samples.jsonl")
    assert [(line["step"], line["prompt"], line["text"]) for line in found] == [
        (2, "Once", " upon 2"),
        (2, "a\nb", ""),
        (4, "Once", " again"),
    ]


def test_samples_that_cannot_be_written_are_logged_and_training_continues(path, caplog):
    log = JsonLog(str(path), 0)
    (path.parent / "run").write_text("a file where the folder should be")
    log.text({"Once": " upon"}, 2)
    assert "samples.jsonl cannot be written" in caplog.text
    log.finish()


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(path):
    log = JsonLog(str(path), 0)
    log.log({"a": 1.0}, 1)
    log.sync()
    assert read(path) == [{"step": 1, "a": 1.0}]
    log.finish()


def test_lines_after_the_restored_step_are_dropped(path):
    write(path, 0, [1, 2, 3, 4])
    write(path, 2, [3, 4, 5])
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5]


def test_the_losses_of_earlier_steps_are_read(path):
    log = JsonLog(str(path), 0)
    for step, metrics in ((1, {"train/loss": 3.0}), (1, {"eval/loss": 9.0}), (2, {"train/loss": math.nan})):
        log.log(metrics, step)
    for step in (3, 4):
        log.log({"train/loss": 1.0 / step}, step)
    log.finish()
    log = JsonLog(str(path), 3)
    log.finish()
    assert log.losses == [3.0, 1.0 / 3]


def test_all_lines_of_the_restored_step_are_kept(path):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": 1.0}, 2)
    log.log({"eval/loss": 2.0}, 2)
    log.finish()
    write(path, 2, [3])
    assert read(path)[:2] == [{"step": 2, "train/loss": 1.0}, {"step": 2, "eval/loss": 2.0}]


def test_a_new_run_keeps_no_earlier_steps(path):
    write(path, 0, [1, 2])
    write(path, 0, [1])
    assert [line["step"] for line in read(path)] == [1]


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 2, "train/lo',
        '{"step": 2}',
        "{",
        '{"step": 2, "a": 1.0}x\n',
        "\x00\x00\x00\n",
        "[1]\n",
        '{"a": 1}\n',
        "\n",
    ],
)
def test_a_truncated_line_is_dropped_and_the_next_is_complete(path, torn):
    write(path, 0, [1])
    with open(path, "a") as file:
        file.write(torn)
    write(path, 5, [6])
    assert [line["step"] for line in read(path)] == [1, 6]


def test_a_last_line_truncated_within_a_character_is_dropped(path):
    write(path, 0, [1])
    with open(path, "ab") as file:
        file.write('{"step": 2, "ü'.encode()[:-1])
    write(path, 5, [6])
    assert [line["step"] for line in read(path)] == [1, 6]


def test_reopening_does_not_change_the_kept_lines(path):
    write(path, 0, range(1, 50))
    before = path.read_bytes()
    write(path, 49, [])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_the_summary_is_the_first_line_and_is_not_repeated(path):
    for restored in (0, 1, 0):
        log = JsonLog(str(path), restored)
        log.hyperparameters({"model": {"hidden_dim": 32}})
        log.summary({"parameters": 7})
        log.log({"a": 1.0}, restored + 1)
        log.finish()
    assert read(path) == [{"step": 0, "parameters": 7}, {"step": 1, "a": 1.0}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_loss_is_still_written_as_valid_json(path, value):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": value}, 1)
    log.finish()
    assert [line["step"] for line in read(path)] == [1]


# Runs in a separate process, since the limit applies to all files of a process. It prints the contents of the log.
FULL = """
import contextlib, json, logging, os, resource, sys
from lmtrain.tracking.json_log import JsonLog

logging.basicConfig(format="%(message)s")
folder, by_limit, room_again = sys.argv[1], sys.argv[2] == "limit", sys.argv[3]
path, ballast = os.path.join(folder, "run.metrics.jsonl"), os.path.join(folder, "ballast")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

def take():
    if by_limit:  # in the middle of a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 150, hard))
        return
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass

def give():
    if by_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    else:
        os.unlink(ballast)

def say():
    with open(path) as file:
        print(json.dumps(file.read()))

log = JsonLog(path, 0)
log.log({"train/loss": 0.5}, 1)
take()
for step in range(2, 302):
    log.log({"train/loss": step / 2, "throughput/tokens_per_second": 123456.0}, step)
    log.sync()
    if step % 100 == 0:
        say()
if room_again == "while it trains":
    give()
    log.log({"train/loss": 0.25}, 302)
    say()
if room_again == "at the end":
    give()
log.finish()
say()
"""


def fill_the_disk(folder, kind, room_again):
    """The steps in the log at several times, its final text, and the messages on stderr."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        if kind == "disk":
            mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder]
            if subprocess.run(mount, capture_output=True).returncode:
                kind = "limit"  # without the right to mount, the limit is tested twice
            else:
                stack.callback(subprocess.run, ["umount", "--lazy", folder], check=True)
        command = [sys.executable, "-c", FULL, str(folder), kind, room_again]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(text.endswith("\n") for text in texts), "incomplete line in the log"
    steps = [[json.loads(line)["step"] for line in text.splitlines()] for text in texts]
    return steps, texts[-1], done.stderr


@pytest.mark.parametrize("kind", ["limit", "disk"])
def test_a_full_disk_loses_no_line_and_all_are_written_once_there_is_space(tmp_path, kind):
    steps, text, stderr = fill_the_disk(tmp_path / "full", kind, room_again="while it trains")
    *while_full, with_room, at_the_end = steps
    assert [found == list(range(1, len(found) + 1)) for found in while_full] == [True] * 3  # and only complete lines
    assert 1 <= len(while_full[0]) == len(while_full[-1]) < 100
    assert with_room == at_the_end == list(range(1, 303))
    line_of_step_301 = {"step": 301, "train/loss": 150.5, "throughput/tokens_per_second": 123456.0}
    assert json.loads(text.splitlines()[300]) == line_of_step_301
    (notice,) = stderr.splitlines()
    assert "run.metrics.jsonl cannot be written: " in notice
    assert "; training continues" in notice


def test_pending_lines_are_written_at_the_end_if_there_is_space_only_then(tmp_path):
    steps, _, stderr = fill_the_disk(tmp_path / "full", "limit", room_again="at the end")
    assert steps[-1] == list(range(1, 302))
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", ["limit", "disk"])
def test_a_disk_that_stays_full_is_logged_with_the_number_of_lost_lines(tmp_path, kind):
    steps, _, stderr = fill_the_disk(tmp_path / "full", kind, room_again="never")
    written = len(steps[-1])
    assert steps[-1] == list(range(1, written + 1))
    first, last = stderr.splitlines()
    assert "; training continues" in first
    assert last.endswith(f"run.metrics.jsonl: {301 - written} lines of metrics could not be written")
