"""Faults in the environment of a run: disk, folders, trackers, clock, a second start of the same run.

Real processes and real files. A run that resumes ends with the same bytes as an undisturbed one.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import run_in_process, tiny_settings
from faults.runs import (
    RUN,
    complete_steps,
    differences,
    finish,
    log_file,
    metrics,
    output_of,
    run_folder,
    running,
    trained_steps,
    wait_for,
    write_config,
)
from forked import Forked

from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.checkpoint.verify import FULL, verify

pytestmark = pytest.mark.end_to_end

LAST, KEEP = 60, 10
SECONDS = 300
ENDLESS = ("--trainer.num_train_steps", 1_000_000, "--hf_save_steps", 1_000_000)
# Exports and what libraries say on the terminal would reach the limit of the size of files too.
NO_OTHER_LARGE_FILES = ("--hf_save_path", "null")
STOP = ("--trainer.checkpointer.on_save_error", "stop")


def settings() -> dict:
    """Checkpoints and exports every ten steps, of sixty."""
    found = tiny_settings()
    found["trainer"] |= {"num_train_steps": LAST, "steps_per_eval": KEEP}
    found["trainer"]["checkpointer"]["keep"] = [{"every": KEEP}]
    return found | {"hf_save_path": "exports", "hf_save_steps": KEEP}


def train(folder: Path, *flags: object, code: int = 0) -> str:
    """Run to the end within this process. -> the output"""
    return run_in_process(["train", "tiny.json", "--trainer.id", RUN, *flags], folder, code).stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, settings())
    train(folder)
    assert complete_steps(folder) == [*range(KEEP, LAST + 1, KEEP)], "\n".join(messages(folder))
    return folder


@pytest.fixture
def folder(undisturbed, tmp_path) -> Path:
    """A folder with the config and the caches, for one test."""
    write_config(tmp_path, settings())
    shutil.copytree(undisturbed / "cache", tmp_path / "cache")
    return tmp_path


def add_checkpoints(folder: Path, undisturbed: Path, *steps: int) -> None:
    """Copy these checkpoints, and the log and exports up to the last of them, from the undisturbed run."""
    for step in steps:
        shutil.copytree(run_folder(undisturbed) / f"step-{step}", run_folder(folder) / f"step-{step}")
    for step in range(KEEP, max(steps) + 1, KEEP):
        name = Path("exports", "one", f"step-{step}")
        shutil.copytree(undisturbed / name, folder / name)
    log_file(folder).parent.mkdir()
    shutil.copy(log_file(undisturbed), log_file(folder))


def messages(folder: Path) -> list[str]:
    """The messages of lmtrain in its log, without times."""
    path = folder / "logs" / "one.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" lmtrain: ")[2] for line in lines if " lmtrain: " in line]


def _is_stopped(pid: int) -> bool:
    """Whether every thread of the process is stopped."""
    try:
        lines = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has ended meanwhile
        return False
    return bool(lines) and all(line.rpartition(")")[2].split()[0] == "T" for line in lines)


@contextlib.contextmanager
def paused(process: Forked) -> Iterator[None]:
    """Stop the process within the block, so that its body happens between two instructions, even on a slow machine."""
    process.send_signal(signal.SIGSTOP)
    while not _is_stopped(process.pid):
        assert process.poll() is None
        time.sleep(0.001)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def contents(*folders: Path) -> dict[str, tuple[bytes, int]]:
    """All files below, with content and modification time."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def other_than_checkpoints(folder: Path) -> set[str]:
    """What there is but checkpoints, which all have to verify: parts of one, a mark, a lock."""
    checkpoints = list_checkpoints(str(run_folder(folder)))
    for checkpoint in checkpoints:
        verify(checkpoint, FULL)
    return set(os.listdir(run_folder(folder))) - {os.path.basename(found.path) for found in checkpoints}


def flip_a_byte(path: Path) -> None:
    """In its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def limit_file_size(process: Forked, size: int) -> None:
    """As a full disk: the embedding is larger than 45,000 bytes, logs are smaller."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.long
def test_a_full_disk_costs_later_checkpoints_only_and_the_resumed_run_ends_with_the_same_bytes(folder, undisturbed):
    """tests/checkpoint/test_checkpointer.py has the retries, and saves that succeed again."""
    with running(folder, *NO_OTHER_LARGE_FILES, output=os.devnull) as process:
        wait_for(lambda: KEEP in complete_steps(folder), [process])
        with paused(process):
            limit_file_size(process, 45_000)
            assert LAST not in complete_steps(folder), "the run finished before the disk was full"
        code = process.wait(timeout=SECONDS)
    assert code == 1
    output = "\n".join(messages(folder))
    failed = re.findall(r"the checkpoint of step (\d+) could not be saved: ", output)
    assert failed[-2:] == [str(LAST), str(LAST)]  # twice: the last step is retried immediately
    assert f"error: the state after step {LAST} could not be saved" in messages(folder)[-1]
    assert trained_steps(folder) == list(range(1, LAST + 1))
    kept = complete_steps(folder)
    assert KEEP in kept
    assert not {int(step) for step in failed} & set(kept)
    left = other_than_checkpoints(folder)
    assert f"resuming after step {kept[-1]} " in finish(folder, *NO_OTHER_LARGE_FILES)
    assert [found for found in differences(folder, undisturbed, LAST) if "export" not in found] == []
    assert left == set()


@pytest.mark.long
@pytest.mark.parametrize(("flags", "continues"), [((), True), (STOP, False)], ids=["continue", "stop"])
@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "a file"])
def test_when_the_folder_of_checkpoints_vanishes_training_continues_or_stops_as_set(folder, replaced, flags, continues):
    """The next save is far from the first, so that none is under way when the folder vanishes, on any machine."""
    keep = '[{"every": 10, "until": 10}, {"every": 500}]'
    far = ("--trainer.num_train_steps", 510, "--trainer.checkpointer.keep", keep, *NO_OTHER_LARGE_FILES)
    with running(folder, *far, *flags) as process:
        wait_for(lambda: any(line.endswith(f"/step-{KEEP}") for line in messages(folder)), [process])  # "saved ..."
        with paused(process):
            shutil.rmtree(folder / "checkpoints")
            if replaced:
                (folder / "checkpoints").write_text("in the way")
            assert trained_steps(folder)[-1] < 500
        output = output_of(process, 1)
    failed = re.findall(r"the checkpoint of step (\d+) could not be saved", output)
    assert failed == (["500", "510", "510"] if continues else ["500"])
    steps = trained_steps(folder)
    assert steps == list(range(1, len(steps) + 1))
    assert (steps[-1] == 510) == continues


def test_a_folder_of_logs_that_vanishes_is_written_again_with_every_step(folder):
    with running(folder) as process:
        wait_for(lambda: KEEP in complete_steps(folder), [process])
        with paused(process):
            shutil.rmtree(folder / "logs")
        output = output_of(process, 0)
    assert trained_steps(folder) == list(range(1, LAST + 1))
    assert output.count("was removed or replaced while the run writes it") == 1
    logs = folder / "logs" / "one"
    for name in ("config.yaml", "goodput.json", "tokenizer/tokenizer.json"):
        assert (logs / name).exists()
    assert "done: " in (folder / "logs" / "one.log").read_text()


@pytest.mark.long  # tests/runtime/test_output.py has streams that cannot be written
def test_a_run_whose_output_and_folder_of_logs_cannot_be_written_saves_every_step(folder):
    with running(folder, output="/dev/full") as process:
        wait_for(lambda: KEEP in complete_steps(folder), [process])
        with paused(process):
            before = messages(folder)
            shutil.rmtree(folder / "logs")
            (folder / "logs").write_text("in the way")
        assert process.wait(SECONDS) == 0
    assert complete_steps(folder)[-1] == LAST
    assert len([line for line in before if "stderr cannot be written: No space left" in line]) == 1


def test_a_second_start_of_a_run_is_refused_and_changes_nothing_and_after_a_kill_it_starts(folder):
    with running(folder, *ENDLESS) as first:
        wait_for(lambda: KEEP in complete_steps(folder), [first])
        with paused(first):
            kept = run_folder(folder), folder / "exports", folder / "cache", folder / "logs" / "one"
            before = contents(*kept), log_file(folder).read_bytes()
            output = finish(folder, *ENDLESS, "--hf_save_steps", 99, code=2, output="second.txt")
            after = contents(*kept), log_file(folder).read_bytes()
            first.kill()
        first.wait()
    assert f"(process {first.pid} on {socket.gethostname()})" in output.splitlines()[-1]
    assert after == before
    with running(folder, *ENDLESS, output="third.txt") as third:
        wait_for(lambda: any("resuming after step " in line for line in messages(folder)), [third])


def test_a_finished_run_has_nothing_to_do_and_changes_no_byte(undisturbed):
    places = [undisturbed / name for name in ("checkpoints", "exports", "cache")]
    before = contents(*places), log_file(undisturbed).read_bytes()
    assert "nothing to do: " in train(undisturbed)
    assert (contents(*places), log_file(undisturbed).read_bytes()) == before


def test_a_corrupt_shard_ends_a_run_that_has_not_read_it(folder):
    """Verified in the background when the run starts, the first time on this machine."""
    train(folder, "--trainer.num_train_steps", 2)
    shard = sorted((folder / "cache" / "train").glob("*.arrayrecord"))[-1]
    flip_a_byte(shard)
    output = train(folder, *ENDLESS, code=2)
    assert f"cache/train/{shard.name} has another checksum" in output


@pytest.mark.long
def test_an_unreachable_service_neither_stops_training_nor_delays_its_end(folder, undisturbed):
    """W&B would try for minutes; lmtrain waits 20 s, then logs offline. The limit allows for a slow machine."""
    changed = settings()
    changed["trainer"]["tracker"] = {"type": "wandb", "mode": "online", "project": "none"}
    write_config(folder, changed)
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0123456789" * 4}
    with running(folder, **nowhere) as process:
        wait_for(lambda: LAST in complete_steps(folder), [process])
        since = time.monotonic()
        output = output_of(process, 0)
        waited = time.monotonic() - since
    assert "W&B is not available (" in output
    assert list(folder.glob("logs/wandb/offline-run-*/run-*.wandb"))  # to be sent later
    assert "done: checkpoints in checkpoints/one" in output
    assert metrics(folder) == metrics(undisturbed)
    assert waited < 55


def change_an_array(step: Path) -> None:
    flip_a_byte(max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))


# tests/checkpoint/test_verify.py has every kind of corruption of every file
def test_a_corrupt_checkpoint_is_set_aside_and_the_run_ends_with_the_same_bytes(folder, undisturbed):
    add_checkpoints(folder, undisturbed, 10, 20, 30)
    newest = run_folder(folder) / "step-30"
    change_an_array(newest)
    before = {path.removeprefix(str(newest)): found for path, found in contents(newest).items()}
    output = train(folder)
    assert f"{newest} was set aside as damaged-step-30" in output
    assert "resuming after step 20 " in output
    aside = run_folder(folder) / "damaged-step-30"
    assert {path.removeprefix(str(aside)): found for path, found in contents(aside).items()} == before
    shutil.rmtree(aside)
    assert differences(folder, undisturbed, LAST) == []


BACKWARDS = """
import time

forwards = time.time
began = forwards()
time.time = lambda: began - (forwards() - began)
"""


@pytest.mark.long
def test_a_wall_clock_that_runs_backwards_delays_no_save(folder):
    flags = ["--trainer.checkpointer.save_interval", "0.2s", "--trainer.checkpointer.keep", "[]"]
    output = finish(folder, "--trainer.num_train_steps", 300, "--hf_save_steps", 300, *flags, before=BACKWARDS)
    saved = [int(step) for step in re.findall(r"saved .*/step-(\d+)", output)]
    assert len(saved) > 2
    assert saved == sorted(saved)
    assert complete_steps(folder) == [300]  # time-based saves are temporary
    stamps = [line.split(" ")[1] for line in (folder / "logs" / "one.log").read_text().splitlines() if line[:2] == "20"]
    assert stamps[-1] < stamps[0]  # the clock of the log did run backwards


def test_when_all_checkpoints_are_corrupt_the_run_is_refused_and_no_byte_is_lost(folder, undisturbed):
    """Twice: the second start finds only the checkpoints that the first has set aside."""
    add_checkpoints(folder, undisturbed, 10, 20)
    for step in (10, 20):
        change_an_array(run_folder(folder) / f"step-{step}")
    places = (run_folder(folder), folder / "exports", log_file(folder).parent)
    before = contents(*places)
    for _ in range(2):
        last = train(folder, code=2).splitlines()[-1]
        assert f"{run_folder(folder)} are corrupt: damaged-step-10, damaged-step-20" in last
        after = {name.replace("damaged-", ""): found for name, found in contents(*places).items()}
        assert {name: after.get(name) for name in before} == before


@pytest.mark.long
def test_killed_between_an_export_and_its_save_the_run_has_export_and_evaluation_once(folder, undisturbed):
    """The time between them is short: if the save is faster than this test, it repeats with the next export."""
    for step in range(KEEP, LAST, KEEP):
        exported = folder / "exports" / "one" / f"step-{step}"
        with running(folder) as process:
            wait_for(exported.exists, [process])
            process.kill()
            process.wait()
        if step not in complete_steps(folder):
            break
    else:
        raise AssertionError("every kill came too late")
    finish(folder)
    assert differences(folder, undisturbed, LAST) == []


# Limits the address space when the first batch is read, to a few more threads.
LIMITED = """
import resource
from pathlib import Path
from lmtrain.train.start.train_batches import TrainBatches

after = TrainBatches.after

def limited(*arguments):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27, resource.RLIM_INFINITY))
    return after(*arguments)

TrainBatches.after = limited
"""


def test_a_reader_without_memory_for_its_threads_ends_the_run_with_the_cause(folder):
    output = finish(folder, code=1, before=LIMITED)
    assert len(re.findall(r"^lmtrain: error: .* can't start new thread", output, re.M)) == 1
    assert complete_steps(folder) == []
