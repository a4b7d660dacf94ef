"""Training during tokenization: it starts early, on the same batches, and reports the errors of tokenization."""

import json
import os
import random
import shutil
import signal

import pytest
from conftest import logged
from faults.runs import finish, output_of, running, wait_for

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
        shutil.copy(folder / f"{number % FILES}.jsonl", folder / f"many-{number}.jsonl")
    return folder


@pytest.fixture
def config(settings, write_config, texts):
    settings["data"] |= {"train_urls": [f"{texts}/{{0..5}}.jsonl"], "num_preprocess_workers": 1, "shuffle": 64}
    settings["trainer"] |= {"steps_per_eval": 100}

    def write(train_urls=None, **trainer):
        data = settings["data"] | ({"train_urls": train_urls} if train_urls else {})
        written = {**settings, "data": data, "trainer": settings["trainer"] | {"id": "online"} | trainer}
        return write_config(written, "tiny.json")

    return write


@pytest.fixture
def many(texts):
    return [f"{texts}/many-{{0..{MANY - 1}}}.jsonl"]


def markers(folder):
    return sorted(path.name for path in (folder / "cache" / "train").glob("shard-*.json"))


def building(folder):
    """The mark of a build that is under way."""
    return folder / "cache" / "train" / ".building"


@pytest.mark.long
def test_losses_equal_those_with_a_finished_cache(config, run_cli, many, tmp_path):
    online = run_cli("train", config(many), code=0)
    assert "training starts while the rest of the data is tokenized" in online.stderr
    assert "one epoch is not known yet" in online.stderr
    run_cli("preprocess", config(many), code=0)
    later = run_cli("train", config(many, id="later"), code=0)
    assert "preprocess" not in later.stderr
    assert len(logged(tmp_path, "train/loss", "online")) == 12
    assert logged(tmp_path, "train/loss", "online") == logged(tmp_path, "train/loss", "later")


@pytest.mark.long
def test_a_run_that_ends_before_its_cache_is_complete_leaves_finished_shards_for_the_next(
    config, run_cli, many, tmp_path
):
    run_cli("train", config(many, num_train_steps=2), code=0)
    assert not (tmp_path / "cache" / "train" / "manifest.json").exists()
    before = markers(tmp_path)
    assert 1 <= len(before) < MANY
    assert not list((tmp_path / "cache" / "train").glob("*.tmp-*"))
    assert "resuming after step 2" in run_cli("train", config(many, num_train_steps=4), code=0).stderr
    assert set(before) <= set(markers(tmp_path))


@pytest.mark.long
def test_an_error_of_tokenization_ends_training(config, run_cli, texts, tmp_path):
    (tmp_path / "broken.jsonl").write_text((texts / "1.jsonl").read_text() + "{broken\n")
    urls = [f"{texts}/0.jsonl", str(tmp_path / "broken.jsonl")]
    failed = run_cli("train", config(train_urls=urls, num_train_steps=10**6), code=2)
    assert "training starts while the rest of the data is tokenized" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith(f"lmtrain: error: {tmp_path}/broken.jsonl:1201: not JSON")
    assert "Traceback" not in failed.stderr
    assert markers(tmp_path) == ["shard-00000-of-00002.json"]


@pytest.mark.long
def test_preprocess_keeps_finished_shards_after_a_signal_and_exits_75(config, tmp_path):
    config()
    with running(tmp_path, verb="preprocess") as process:
        wait_for(lambda: markers(tmp_path), [process])
        os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does, including workers
        output = output_of(process, 75)
    assert "finished shards are kept: run the same command again to resume" in output
    kept = markers(tmp_path)
    assert 1 <= len(kept) < FILES
    names = {path.name for path in (tmp_path / "cache" / "train").iterdir()}
    assert names == {*kept, *(name.replace(".json", ".arrayrecord") for name in kept)}
    assert f"preprocess: {len(kept)} of {FILES} shards finished" in finish(tmp_path, verb="preprocess")


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_of_two_processes_one_builds_a_cache_and_the_other_takes_over_if_it_is_killed(config, tmp_path, killed):
    config()
    with running(tmp_path, verb="preprocess", output="first.txt") as first:
        wait_for(lambda: markers(tmp_path) or (not killed and building(tmp_path).exists()), [first])
        with running(tmp_path, verb="preprocess") as second:
            wait_for(lambda: "is building it; using its shards" in second.output.read_text(), [second])
            if killed:
                first.kill()
            codes = [process.wait(timeout=DEADLINE_SECONDS) for process in (first, second)]
    output = second.output.read_text()
    assert codes == [-signal.SIGKILL if killed else 0, 0], output
    assert f"process {first.pid} on" in output
    assert killed or "shards to build" not in output
    assert len(markers(tmp_path)) == FILES
    assert not building(tmp_path).exists()
