"""Training during tokenization: it starts early, on the same batches, and reports the errors of tokenization."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

DEADLINE_SECONDS = 300
FILES = 6
MANY = 40  # tokenization takes much longer than the start of a run, on any machine


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Files that take a worker about half a second each."""
    folder = tmp_path_factory.mktemp("texts")
    words = [f"{letter}{number}" for letter in "abcdefgh" for number in range(99)]
    for number in range(FILES):
        chosen = random.Random(number)
        lines = (json.dumps({"text": " ".join(chosen.choices(words, k=200))}) + "\n" for _ in range(1200))
        (folder / f"{number}.jsonl").write_text("".join(lines))
    for number in range(MANY):
        (folder / f"many-{number}.jsonl").symlink_to(folder / f"{number % FILES}.jsonl")
    return folder


@pytest.fixture
def config(settings, write_config, texts):
    settings["data"] |= {"train_urls": [f"{texts}/{{0..5}}.jsonl"], "num_preprocess_workers": 1, "shuffle": 64}
    settings["trainer"] |= {"steps_per_eval": 100}

    def write(name="online", train_urls=None, **trainer):
        data = settings["data"] | ({"train_urls": train_urls} if train_urls else {})
        written = {**settings, "data": data, "trainer": settings["trainer"] | {"id": name} | trainer}
        return write_config(written, f"{name}.yaml")

    return write


def losses(folder, run):
    lines = (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {entry["step"]: entry["train/loss"] for entry in found if "train/loss" in entry}


def markers(folder):
    return sorted(path.name for path in (folder / "cache" / "train").glob("shard-*.json"))


@pytest.mark.long
def test_losses_equal_those_with_a_finished_cache(config, run_cli, texts, tmp_path):
    many = [f"{texts}/many-{{0..{MANY - 1}}}.jsonl"]
    online = run_cli("train", config("online", many))
    assert online.returncode == 0, online.stderr
    assert "training starts while the rest of the data is tokenized" in online.stderr
    assert "one epoch is not known yet" in online.stderr
    finished = run_cli("preprocess", config("online", many))
    assert finished.returncode == 0, finished.stderr
    later = run_cli("train", config("later", many))
    assert later.returncode == 0, later.stderr
    assert "preprocess" not in later.stderr
    assert len(losses(tmp_path, "online")) == 12
    assert losses(tmp_path, "online") == losses(tmp_path, "later")


@pytest.mark.long
def test_a_run_that_ends_before_its_cache_is_complete_leaves_finished_shards_for_the_next(
    config, run_cli, texts, tmp_path
):
    many = [f"{texts}/many-{{0..{MANY - 1}}}.jsonl"]
    first = run_cli("train", config("online", many, num_train_steps=2))
    assert first.returncode == 0, first.stderr
    assert not (tmp_path / "cache" / "train" / "manifest.json").exists()
    before = markers(tmp_path)
    assert 1 <= len(before) < MANY
    assert not list((tmp_path / "cache" / "train").glob("*.tmp-*"))
    resumed = run_cli("train", config("online", many, num_train_steps=4))
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 2" in resumed.stderr
    assert set(before) <= set(markers(tmp_path))


@pytest.mark.long
def test_an_error_of_tokenization_ends_training(config, run_cli, texts, tmp_path):
    (tmp_path / "broken.jsonl").write_text((texts / "1.jsonl").read_text() + "{broken\n")
    urls = [f"{texts}/0.jsonl", str(tmp_path / "broken.jsonl")]
    failed = run_cli("train", config(train_urls=urls, num_train_steps=10**6))
    assert failed.returncode == 2
    assert "training starts while the rest of the data is tokenized" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith(f"lmtrain: error: {tmp_path}/broken.jsonl:1201: not JSON")
    assert "Traceback" not in failed.stderr
    assert markers(tmp_path) == ["shard-00000-of-00002.json"]


def start(folder, *arguments):
    command = [sys.executable, "-m", "lmtrain", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(found, process):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not found():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_preprocess_keeps_finished_shards_after_a_signal_and_exits_75(config, lmtrain, tmp_path):
    path = config()
    process = start(tmp_path, "preprocess", path)
    wait_for(lambda: markers(tmp_path), process)
    os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does, including workers
    _, output = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75, output
    assert "finished shards are kept: run the same command again to resume" in output
    kept = markers(tmp_path)
    assert 1 <= len(kept) < FILES
    names = {path.name for path in (tmp_path / "cache" / "train").iterdir()}
    assert names == {*kept, *(name.replace(".json", ".arrayrecord") for name in kept)}
    again = lmtrain("preprocess", path)
    assert again.returncode == 0, again.stderr
    assert f"preprocess: {len(kept)} of {FILES} shards are finished" in again.stderr


@pytest.mark.long
def test_two_processes_build_the_same_cache_once(config, tmp_path):
    path = config()
    first = start(tmp_path, "preprocess", path)
    wait_for(lambda: (tmp_path / "cache" / "train" / ".building").exists(), first)
    second = start(tmp_path, "preprocess", path)
    output = [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), output
    assert f"process {first.pid} on" in output[1]
    assert "is building it; using its shards" in output[1]
    assert "shards to build" not in output[1]
    assert not (tmp_path / "cache" / "train" / ".building").exists()


@pytest.mark.long
def test_a_second_process_takes_over_the_build_after_the_first_is_killed(config, tmp_path):
    path = config()
    first = start(tmp_path, "preprocess", path)
    wait_for(lambda: markers(tmp_path), first)
    second = start(tmp_path, "preprocess", path)
    time.sleep(1.5)
    first.kill()
    first.communicate()
    _, output = second.communicate(timeout=DEADLINE_SECONDS)
    assert second.returncode == 0, output
    assert "is building it; using its shards" in output
    assert len(markers(tmp_path)) == FILES


def test_a_dry_run_lists_the_shards_and_writes_nothing(config, run_cli, texts, tmp_path):
    path = config()
    before = sorted(tmp_path.rglob("*"))
    dry = run_cli("preprocess", path, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f"cache/train: {FILES} of {FILES} shards to build" in dry.stdout
    assert f"  shard-00003-of-00006 <- {texts}/3.jsonl (" in dry.stdout
    assert "on 1 local processes" in dry.stdout
    assert sorted(tmp_path.rglob("*")) == before
