"""The JSON log: every metric once, however often a run is killed."""

import contextlib
import json
import os
import resource
import shutil

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


@pytest.mark.parametrize(
    ("restored", "steps", "expected"),
    [(0, [1], [1]), (2, [3, 4, 5], [1, 2, 3, 4, 5]), (4, [], [1, 2, 3, 4])],
    ids=["a new run", "resumed", "resumed from the last step"],
)
def test_lines_after_the_restored_step_are_dropped_and_the_others_do_not_change(path, restored, steps, expected):
    write(path, 0, [1, 2, 3, 4])
    before = path.read_bytes().splitlines()[:restored]
    write(path, restored, steps)
    assert [line["step"] for line in read(path)] == expected
    assert path.read_bytes().splitlines()[:restored] == before
    assert os.listdir(path.parent) == [path.name]


def test_all_lines_of_the_restored_step_are_kept(path):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": 1.0}, 2)
    log.log({"eval/loss": 2.0}, 2)
    log.finish()
    write(path, 2, [3])
    assert read(path)[:2] == [{"step": 2, "train/loss": 1.0}, {"step": 2, "eval/loss": 2.0}]


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 2, "train/lo',
        '{"step": 2}',
        '{"step": 2, "a": 1.0}x\n',
        "[1]\n",
        '{"step": 2, "ü'.encode()[:-1],  # within a character
    ],
)
def test_a_truncated_line_is_dropped_and_the_next_is_complete(path, torn):
    write(path, 0, [1])
    with open(path, "ab") as file:
        file.write(torn if isinstance(torn, bytes) else torn.encode())
    write(path, 5, [6])
    assert [line["step"] for line in read(path)] == [1, 6]


def test_the_summary_is_the_first_line_and_is_not_repeated(path):
    for restored in (0, 1, 0):
        log = JsonLog(str(path), restored)
        log.hyperparameters({"model": {"hidden_dim": 32}})
        log.summary({"parameters": 7})
        log.log({"a": 1.0}, restored + 1)
        log.finish()
    assert read(path) == [{"step": 0, "parameters": 7}, {"step": 1, "a": 1.0}]


def test_a_line_is_valid_json_and_in_the_file_as_soon_as_it_is_logged(path):
    log = JsonLog(str(path), 0)
    for step, value in enumerate((1.0, float("nan"), float("inf"), -float("inf")), start=1):
        log.log({"train/loss": value}, step)
    log.sync()
    assert [line["train/loss"] for line in read(path)] == [1.0, None, None, None]
    log.finish()


@contextlib.contextmanager
def full_disk(path):
    """No file can grow by more than 150 bytes, which is in the middle of a line."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 150, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room_again", ["while it trains", "at the end", "never"])
def test_a_full_disk_loses_no_line_and_all_are_written_once_there_is_space(path, caplog, room_again):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": 0.5}, 1)
    with full_disk(path):
        for step in range(2, 302):
            log.log({"train/loss": step / 2, "throughput/tokens_per_second": 123456.0}, step)
            log.sync()
        assert path.read_text().endswith("\n")
        assert [line["step"] for line in read(path)] == [1, 2, 3]  # only complete lines
        if room_again == "never":
            log.finish()
    if room_again == "while it trains":
        log.log({"train/loss": 0.25}, 302)
        assert [line["step"] for line in read(path)] == list(range(1, 303))
    if room_again != "never":
        log.finish()
        assert read(path)[300] == {"step": 301, "train/loss": 150.5, "throughput/tokens_per_second": 123456.0}
    messages = [record.getMessage() for record in caplog.records]
    assert [str(path) in message for message in messages] == [True] * (1 + (room_again == "never"))
    assert ("298 lines" in messages[-1]) == (room_again == "never")


@pytest.mark.parametrize("how", ["folder removed", "replaced"])
def test_a_removed_log_is_written_again_with_all_its_lines(path, caplog, how):
    calls = []
    log = JsonLog(str(path), 0, lambda: calls.append(1))
    for step in range(1, 4):
        log.log({"train/loss": step / 4}, step)
    if how == "folder removed":
        shutil.rmtree(path.parent)
    else:
        path.unlink()
        path.write_text("")
    for step in range(4, 6):
        log.log({"train/loss": step / 4}, step)
    log.finish()
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5]
    assert len(caplog.records) == 1
    assert calls == [1]


def test_a_log_that_is_removed_and_cannot_be_written_again_is_kept_in_memory(path, caplog):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": 1.0}, 1)
    shutil.rmtree(path.parent)
    path.parent.write_text("a file in its place")
    log.log({"train/loss": 2.0}, 2)
    assert "cannot be written" in caplog.text
    path.parent.unlink()
    log.finish()
    assert [line["step"] for line in read(path)] == [1, 2]
