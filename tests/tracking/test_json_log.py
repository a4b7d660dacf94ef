"""The JSON log: every metric once, however often a run is killed."""

import json
import os

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


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(path):
    log = JsonLog(str(path), 0)
    log.log({"a": 1.0}, 1)
    log.sync()
    assert read(path) == [{"step": 1, "a": 1.0}]
    log.finish()


def test_what_came_after_the_restored_step_is_cut(path):
    write(path, 0, [1, 2, 3, 4])
    write(path, 2, [3, 4, 5])
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5]


def test_all_lines_of_the_restored_step_stay(path):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": 1.0}, 2)
    log.log({"eval/loss": 2.0}, 2)
    log.finish()
    write(path, 2, [3])
    assert read(path)[:2] == [{"step": 2, "train/loss": 1.0}, {"step": 2, "eval/loss": 2.0}]


def test_a_run_that_starts_afresh_keeps_no_steps(path):
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
def test_a_torn_line_is_dropped_and_the_next_is_whole(path, torn):
    write(path, 0, [1])
    with open(path, "a") as file:
        file.write(torn)
    write(path, 5, [6])
    assert [line["step"] for line in read(path)] == [1, 6]


def test_a_last_line_torn_within_a_character_is_dropped(path):
    write(path, 0, [1])
    with open(path, "ab") as file:
        file.write('{"step": 2, "ü'.encode()[:-1])
    write(path, 5, [6])
    assert [line["step"] for line in read(path)] == [1, 6]


def test_opening_again_changes_no_byte_of_what_is_kept(path):
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
def test_a_loss_that_is_no_number_still_makes_a_line_of_json(path, value):
    log = JsonLog(str(path), 0)
    log.log({"train/loss": value}, 1)
    log.finish()
    assert [line["step"] for line in read(path)] == [1]
