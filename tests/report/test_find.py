"""Finding a run by its metrics file, its folder or its id."""

import os

import pytest
from report.made import training, write_log

from lmtrain.report.run import RunFiles, find_run, find_runs, name_runs
from lmtrain.runtime.errors import UserError


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(("gpt2_nano-b2e784", "llama-1", "two.5")):
        path = write_log(tmp_path / "logs", run, training(1))
        os.utime(path, (1e9 - age, 1e9 - age))
    return tmp_path / "logs"


@pytest.mark.parametrize("name", ["two.5", "logs/two.5", "logs/two.5/", "logs/two.5.metrics.jsonl", "./logs//two.5"])
def test_a_run_is_named_by_metrics_file_folder_or_id(logs, name):
    found = find_run(name, "logs/")
    assert found.id == "two.5"
    assert os.path.samefile(found.metrics, logs / "two.5.metrics.jsonl")
    assert os.path.abspath(found.folder) == str(logs / "two.5")


def test_a_run_is_found_from_inside_its_folder(logs, monkeypatch):
    (logs / "two.5").mkdir()
    monkeypatch.chdir(logs / "two.5")
    assert find_run(".", "logs/").id == "two.5"


def test_log_dir_is_another_folder(logs, tmp_path):
    other = write_log(tmp_path / "elsewhere", "two.5", training(1))
    assert find_run("two.5", "elsewhere").metrics == str(other.relative_to(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3_nano-b2e784", "run gpt3_nano-b2e784 not found; did you mean 'gpt2_nano-b2e784'?"),
        ("logs/llama-2", "did you mean 'llama-1'?"),
        ("zzz", "run zzz not found; runs in logs/: gpt2_nano-b2e784, llama-1, two.5"),
        ("logs", "runs in logs: gpt2_nano-b2e784, llama-1, two.5"),
        ("nowhere/one", "no nowhere/one.metrics.jsonl, and no *.metrics.jsonl in nowhere; --log_dir"),
        ("gs://bucket/logs/one", "local files"),
    ],
)
def test_an_unknown_run_is_an_error_that_lists_the_existing_ones(logs, name, message):
    with pytest.raises(UserError) as error:
        find_run(name, "logs/")
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["gpt2_nano", "g", "logs/gpt2"])
def test_a_unique_prefix_is_enough(logs, name):
    assert find_run(name, "logs/").id == "gpt2_nano-b2e784"


def test_an_ambiguous_prefix_is_an_error(logs):
    write_log(logs, "gpt2_nano-ffffff", training(1))
    with pytest.raises(UserError, match=r"^gpt2_nano is ambiguous: gpt2_nano-\w+, gpt2_nano-\w+$"):
        find_run("gpt2_nano", "logs/")


def test_of_many_runs_the_newest_are_listed(logs):
    for number in range(30):
        write_log(logs, f"many-{number}", training(1))
    with pytest.raises(UserError, match=r": many-.*, and 13 more$") as error:
        find_run("zzz", "logs/")
    assert "llama-1" not in str(error.value)


def test_a_run_that_is_named_twice_is_an_error(logs):
    assert [run.id for run in find_runs(["two.5", "llama-1"], "logs/")] == ["two.5", "llama-1"]
    with pytest.raises(UserError, match=r"two\.5 and logs/two\.5 are the same run"):
        find_runs(["two.5", "llama-1", "logs/two.5"], "logs/")


def test_runs_with_the_same_id_are_distinguished_by_their_folders():
    places = ["a/x/logs/one", "b/x/logs/one", "b/y/logs/one", "b/y/logs/two"]
    runs = [RunFiles(os.path.basename(place), f"/{place}.metrics.jsonl", f"/{place}") for place in places]
    assert name_runs(runs) == ["one (a/x/logs)", "one (b/x/logs)", "one (b/y/logs)", "two"]
    in_one_folder = [RunFiles("one", "/l/one.metrics.jsonl", "/l/one"), RunFiles("one", "/l/one.jsonl", "/l/one")]
    assert len(set(name_runs(in_one_folder))) == 2
