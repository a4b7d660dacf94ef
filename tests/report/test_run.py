"""Finding a run, and reading it even if files are missing, incomplete or corrupt."""

import json
import math
import os

import pytest
from report.made import attempt, read, training, write_complete, write_config, write_log, write_samples

from lmtrain.report.run import RunFiles, find_run, find_runs, name_runs, read_samples
from lmtrain.runtime.errors import UserError


def test_a_complete_run(tmp_path):
    write_complete(tmp_path)
    run = read(tmp_path)
    assert run.notices == []
    assert run.last_step == 40
    assert len(run.curves["train/loss"].steps) == 40
    assert run.curves["eval/books/loss"].steps.tolist() == [10, 20, 30, 40]
    assert "grad/norm/blocks/kernel" not in run.curves
    assert run.facts == {"parameter_count": 1234567, "throughput/device_kind": "abacus"}
    assert run.restarts == [20]
    assert run.config == {"optimizer": {"learning_rate": 6e-4}, "trainer": {"num_train_steps": 40}}
    assert "# my.yaml:3" in run.config_text
    # 5 of the 25 steps of the first start were repeated: a fifth of its 50 seconds; 50 more passed before the second
    assert run.fractions["lost"] == pytest.approx(10 / 250)
    assert run.fractions["down"] == pytest.approx(50 / 250)
    assert sum(run.fractions.values()) == pytest.approx(1)


def test_other_invalid_lines_are_reported(tmp_path):
    write_complete(tmp_path)
    bad = ["not json\n", "[1]\n", '{"train/loss": 1}\n', '{"step": "x"}\n', '{"step": -1}\n', f'{{"step": {10**30}}}\n']
    path = tmp_path / "one.metrics.jsonl"
    path.write_bytes("".join(bad).encode() + b"\xff\xfe\n" + path.read_bytes() + b"\n")
    with open(path, "a") as file:
        file.write('{"step": 41, "train/lo')  # not reported: it may be being written
    run = read(tmp_path)
    assert run.last_step == 40
    assert run.notices == [f"left out of {path}: 7 lines without a JSON object with a step"]


def test_values_that_are_not_finite_numbers(tmp_path):
    lines = [
        {"step": 1, "train/loss": 2.0, "train/gradient_norm": None},
        {"step": 2, "train/loss": None, "train/gradient_norm": "text"},
        {"step": 3, "train/loss": math.inf, "train/gradient_norm": True},
        {"step": 4.0, "train/loss": 3},
    ]
    path = write_log(tmp_path, "one", lines)
    path.write_text(path.read_text() + '{"step": 5, "train/loss": NaN}\n')
    run = read(tmp_path)
    assert run.curves["train/loss"].bad_steps.tolist() == [2, 3, 5]
    assert run.curves["train/loss"].sum == 5
    assert run.curves["train/gradient_norm"].bad == 1
    assert math.isnan(run.curves["train/loss"].last)


def test_ledger_and_config_may_be_missing(tmp_path):
    write_log(tmp_path, "one", training())
    run = read(tmp_path)
    assert (run.attempts, run.restarts, run.fractions) == ([], [], {})
    assert run.config is run.config_text is None
    assert len(run.notices) == 2
    assert "goodput.json" in run.notices[0]
    assert "config.yaml" in run.notices[1]


@pytest.mark.parametrize(
    "ledger",
    ["{", json.dumps({"attempts": [attempt(1, 2, 0, 5) | {"started": "x"}]})],
    ids=["incomplete", "text for a number"],
)
def test_a_corrupt_ledger_is_reported(tmp_path, ledger):
    write_complete(tmp_path)
    (tmp_path / "one" / "goodput.json").write_text(ledger)
    run = read(tmp_path)
    assert run.attempts == []
    assert "goodput.json is corrupt" in run.notices[0]


@pytest.mark.parametrize("text", ["a: [", "- 1\n"])
def test_a_config_that_is_not_a_map_is_shown_as_text(tmp_path, text):
    write_complete(tmp_path)
    write_config(tmp_path, "one", text)
    run = read(tmp_path)
    assert (run.config, run.config_text) == (None, text)
    assert "config.yaml is not a YAML map" in run.notices[0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"step": 0, "parameter_count": 3}], "has not finished a step yet"),
        ([{"step": 9, "grad/norm/a": 1.0, "goodput/steps": 1.0}], "no metric"),
        ([{"no": "step"}], "left out: 1 line"),
    ],
)
def test_a_log_without_metrics_is_an_error(tmp_path, lines, message):
    write_log(tmp_path, "one", lines)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_secrets_that_an_earlier_version_saved_are_not_shown(tmp_path):
    write_complete(tmp_path)
    write_config(
        tmp_path, "one", "a: {api_key: planted-1}  # c.yaml:1\nb: https://me:planted-2@host/?token=planted-3\n"
    )
    run = read(tmp_path)
    assert run.config_text == "a: {api_key: ***}  # c.yaml:1\nb: https://***@host/?***\n"
    assert run.config == {"a": {"api_key": "***"}, "b": "https://***@host/?***"}


def test_lines_without_a_sample_are_reported_and_an_incomplete_last_line_is_ignored(tmp_path):
    path = write_samples(
        tmp_path,
        (10, "a", "killed"),
        (10, "a", "x"),
        ("10", "a", "x"),
        (10, None, "x"),
        end='[1]\n{\n{"step": 11, "pro',
    )
    notices: list[str] = []
    assert read_samples(path, notices) == {"a": {10: "x"}}
    assert notices == [f"left out of {path}: 4 lines without a sample"]


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(("gpt2_nano-b2e784", "llama-1", "two.5")):
        path = write_log(tmp_path / "logs", run, training(1))
        os.utime(path, (1e9 - age, 1e9 - age))
    return tmp_path / "logs"


@pytest.mark.parametrize("name", ["two.5", "logs/two.5/", "logs/two.5.metrics.jsonl"])
def test_a_run_is_named_by_metrics_file_folder_or_id(logs, name):
    found = find_run(name, "logs/")
    assert found.id == "two.5"
    assert os.path.samefile(found.metrics, logs / "two.5.metrics.jsonl")
    assert os.path.abspath(found.folder) == str(logs / "two.5")


def test_a_run_is_found_from_inside_its_folder(logs, monkeypatch):
    (logs / "two.5").mkdir()
    monkeypatch.chdir(logs / "two.5")
    assert find_run(".", "logs/").id == "two.5"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("logs/llama-2", "'llama-1'?"),
        ("zzz", "runs in logs/: gpt2_nano-b2e784, llama-1, two.5"),
        ("nowhere/one", "nowhere/one.metrics.jsonl"),
        ("gs://bucket/logs/one", "local files"),
    ],
)
def test_an_unknown_run_is_an_error_that_lists_the_existing_ones(logs, name, message):
    with pytest.raises(UserError) as error:
        find_run(name, "logs/")
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["g", "logs/gpt2"])
def test_a_unique_prefix_is_enough(logs, name):
    assert find_run(name, "logs/").id == "gpt2_nano-b2e784"


def test_an_ambiguous_prefix_is_an_error(logs):
    write_log(logs, "gpt2_nano-ffffff", training(1))
    with pytest.raises(UserError, match=r"^gpt2_nano .*: gpt2_nano-\w+, gpt2_nano-\w+$"):
        find_run("gpt2_nano", "logs/")


def test_a_run_that_is_named_twice_is_an_error(logs):
    assert [run.id for run in find_runs(["two.5", "llama-1"], "logs/")] == ["two.5", "llama-1"]
    with pytest.raises(UserError, match=r"two\.5 and logs/two\.5"):
        find_runs(["two.5", "llama-1", "logs/two.5"], "logs/")


def test_runs_with_the_same_id_are_distinguished_by_their_folders():
    places = ["a/x/logs/one", "b/x/logs/one", "b/y/logs/one", "b/y/logs/two"]
    runs = [RunFiles(os.path.basename(place), f"/{place}.metrics.jsonl", f"/{place}") for place in places]
    assert name_runs(runs) == ["one (a/x/logs)", "one (b/x/logs)", "one (b/y/logs)", "two"]
    in_one_folder = [RunFiles("one", "/l/one.metrics.jsonl", "/l/one"), RunFiles("one", "/l/one.jsonl", "/l/one")]
    assert len(set(name_runs(in_one_folder))) == 2
