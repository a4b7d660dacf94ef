"""Faults in a batch job of `lmtrain preprocess`, after which the next run resumes with the same result."""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

DEADLINE_SECONDS = 300

PEAK_OF_COMMAND = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Eight files, one shard each."""
    folder = tmp_path_factory.mktemp("sources")
    for name in "abcdefgh":
        lines = (json.dumps({"text": f"the river {name} {i * 7919 % 1000003} counts {i}"}) + "\n" for i in range(3000))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def config(settings, write_config, sources):
    settings["data"] |= {
        "train_urls": [f"{sources}/{{a..h}}.jsonl"],
        "validation_urls": None,
        "num_preprocess_workers": 2,
        "split_bytes": 200_000,
    }
    return write_config(settings)


@pytest.fixture(scope="module")
def undisturbed(sources, tmp_path_factory):
    """The files of a build by one worker without faults."""
    from conftest import tiny_settings

    from lmtrain.data.config import DataConfig
    from lmtrain.preprocess.build import build_cache

    folder = tmp_path_factory.mktemp("undisturbed")
    data = tiny_settings()["data"] | {
        "train_urls": [f"{sources}/{{a..h}}.jsonl"],
        "cache_dir": str(folder),
        "num_preprocess_workers": 1,
        "split_bytes": 200_000,
    }
    build_cache(DataConfig(**data), "train")
    return contents(folder / "train")


@pytest.fixture
def built(undisturbed, tmp_path):
    """The folder of a finished cache, for one test."""
    folder = tmp_path / "cache" / "train"
    folder.mkdir(parents=True)
    for name, content in undisturbed.items():
        (folder / name).write_bytes(content)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def command(config, *flags):
    return [sys.executable, "-m", "lmtrain", "preprocess", str(config), *flags]


def finish(config, folder, undisturbed):
    done = subprocess.run(command(config), cwd=folder, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert contents(folder / "cache" / "train") == undisturbed
    return done.stderr


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.long)])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(config, undisturbed, tmp_path, kills):
    """Kills at random moments of the time that a complete run takes here. A run that was faster is repeated."""
    started = time.monotonic()
    finish(config, tmp_path, undisturbed)
    duration = time.monotonic() - started
    shutil.rmtree(tmp_path / "cache")
    moments = random.Random(0)
    marked = [0]
    killed = 0
    while killed < kills:
        process = subprocess.Popen(command(config), cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(moments.uniform(0.1, 0.8) * duration)
        # the job's main process alone, or with its workers, as when a machine fails
        kill = os.killpg if moments.random() < 0.5 else os.kill
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            killed += 1
            marked.append(len(list(tmp_path.glob("cache/train/shard-*.json"))))
            assert marked[-1] >= marked[-2]  # finished shards are kept
        else:
            assert contents(tmp_path / "cache" / "train") == undisturbed
            shutil.rmtree(tmp_path / "cache")
            marked = [0]
    finish(config, tmp_path, undisturbed)


@pytest.mark.long
def test_a_full_disk_is_one_clear_error_and_the_next_run_resumes(config, undisturbed, tmp_path):
    limited = ["bash", "-c", 'ulimit -f 68; exec "$@"', "limited", *command(config)]  # in KB; a shard has more
    full = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert full.returncode == 2
    last = full.stderr.splitlines()[-1]
    assert last.startswith("lmtrain: error: ")
    assert last.endswith("cannot be written: File too large; finished shards are kept")
    assert "Traceback" not in full.stderr
    assert not [name for name in os.listdir(tmp_path / "cache" / "train") if "tmp" in name]
    finish(config, tmp_path, undisturbed)


def test_a_full_file_system_is_one_clear_error_and_the_next_run_resumes(config, undisturbed, tmp_path):
    disk = tmp_path / "cache"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", disk], capture_output=True)
    if mount.returncode:
        return  # no right to mount; the test above uses a limit instead
    try:
        full = subprocess.run(command(config), cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        assert full.returncode == 2, full.stderr
        assert "No space left on device" in full.stderr.splitlines()[-1]
        kept = {name for name in os.listdir(disk / "train") if name.endswith(".json")}
        assert 0 < len(kept) < len(undisturbed) // 2
        assert not [name for name in os.listdir(disk / "train") if "tmp" in name]
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        output = finish(config, tmp_path, undisturbed)
        assert f"preprocess: {len(kept)} of " in output
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.long
def test_a_worker_killed_for_its_memory_is_reported_and_the_next_run_resumes(config, undisturbed, tmp_path):
    process = subprocess.Popen(command(config), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    cache = tmp_path / "cache" / "train"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (list(cache.glob("shard-*.json")) and (found := list(cache.glob("*.tmp-*")))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(found[0].name.rpartition("-")[2]), signal.SIGKILL)  # as the kernel's OOM killer does
    _, output = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 2, output
    assert "a tokenizer process died without an error, most likely killed for using too much memory" in output
    assert "Run the same command again with a smaller data.num_preprocess_workers" in output
    finish(config, tmp_path, undisturbed)


def corrupt_gzip(path):
    content = bytearray(gzip.compress(b'{"text": "some words"}\n' * 4000))
    content[-6] ^= 255  # a byte of the checksum; elsewhere the text changes, which is seldom valid JSON
    path.write_bytes(content)


def truncated_gzip(path):
    path.write_bytes(gzip.compress(b'{"text": "some words"}\n' * 4000)[:-20])


CORRUPT_INPUTS = {
    "corrupt": (corrupt_gzip, "corrupt after line "),
    "truncated": (truncated_gzip, "corrupt after line "),
    "not gzip": (lambda path: path.write_text('{"text": "plain"}\n'), "corrupt after line 0"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", CORRUPT_INPUTS)
def test_a_corrupt_input_is_an_error_with_its_place_and_fixing_it_is_enough(config, sources, lmtrain, tmp_path, kind):
    corrupt, message = CORRUPT_INPUTS[kind]
    corrupt(tmp_path / "z.jsonl.gz")
    urls = json.dumps([f"{sources}/a.jsonl", str(tmp_path / "z.jsonl.gz")])
    failed = lmtrain("preprocess", config, "--data.train_urls", urls)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith(f"lmtrain: error: {tmp_path}/z.jsonl.gz: {message}")
    assert not (tmp_path / "cache" / "train" / "manifest.json").exists()
    with gzip.open(tmp_path / "z.jsonl.gz", "wb") as file:
        file.write(b'{"text": "fixed"}\n')
    fixed = lmtrain("preprocess", config, "--data.train_urls", urls)
    assert fixed.returncode == 0, fixed.stderr
    assert "3,001 documents" in fixed.stderr


def test_an_empty_file_is_a_shard_without_documents(config, lmtrain, sources, tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    urls = json.dumps([f"{sources}/a.jsonl", str(tmp_path / "empty.jsonl")])
    done = lmtrain("preprocess", config, "--data.train_urls", urls)
    assert done.returncode == 0, done.stderr
    assert "3,000 documents" in done.stderr


def flip(path):
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda shard: os.truncate(shard, 5000), "has 5,000 bytes instead of "),
        (lambda shard: shard.unlink(), "is missing: the cache is corrupt"),
        (flip, "cannot be read: Corrupted "),
    ],
    ids=["truncated", "deleted", "flipped byte"],
)
def test_training_refuses_a_corrupt_cache_with_advice(config, lmtrain, built, undisturbed, corrupt, message):
    shard = sorted(built.glob("*.arrayrecord"))[0]
    corrupt(shard)
    failed = lmtrain("train", config)
    assert failed.returncode == 2, failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert last.startswith(f"lmtrain: error: cache/train/{shard.name} {message}")
    advice = f"delete cache/train/{shard.stem}.* and cache/train/manifest.json and run `lmtrain preprocess` again"
    assert last.endswith(advice)
    for path in (shard, shard.with_suffix(".json"), built / "manifest.json"):
        path.unlink(missing_ok=True)
    fixed = lmtrain("preprocess", config)
    assert fixed.returncode == 0, fixed.stderr
    assert contents(built) == undisturbed


def test_a_manifest_of_another_version_is_refused_and_kept(config, lmtrain, built):
    manifest = built / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    before = manifest.read_bytes()
    for verb in ("preprocess", "train"):
        failed = lmtrain(verb, config)
        assert failed.returncode == 2
        assert "unsupported format 1, expected 2" in failed.stderr
        assert "delete the folder to build the cache again" in failed.stderr
    assert manifest.read_bytes() == before


@pytest.mark.long
def test_one_document_of_fifty_megabytes_stays_within_memory(settings, write_config, tmp_path):
    """A tokenizer that splits safely tokenizes it in parts; the limit is for the peak memory of every process."""
    text = "words and more words " * 2_500_000
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text[:50_000_000]}) + "\n")
    settings["data"] |= {"train_urls": [str(tmp_path / "long.jsonl")], "validation_urls": None, "tokenizer": "byte"}
    path = write_config(settings)
    # through a separate small process: after fork and exec a process's peak includes that of this large one
    measured = [sys.executable, "-c", PEAK_OF_COMMAND, *command(path)]
    done = subprocess.run(measured, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "1 documents, 50,000,001 tokens" in done.stderr
    assert int(done.stdout) < 2_000_000  # kilobytes; in one call the encoder alone uses three times that


def test_a_document_that_cannot_be_split_is_refused_with_its_place(settings, write_config, lmtrain, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "short"}) + "\n" + json.dumps({"text": "x" * 11_000_000}))
    settings["data"] |= {"train_urls": [str(tmp_path / "long.jsonl")], "validation_urls": None}
    failed = lmtrain("preprocess", write_config(settings))
    assert failed.returncode == 2
    assert f"{tmp_path}/long.jsonl:2: a document of 11,000,000 bytes has a block of 11,000,000 bytes" in failed.stderr
    assert "longer than data.max_document_bytes 10,000,000" in failed.stderr
