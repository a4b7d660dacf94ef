"""Faults in the environment of a run: disk, folders, trackers, clock, a second start of the same run.

Real processes and real files. A run that resumes run_to_end with the same bytes as an undisturbed one.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import tiny_settings
from faults.runs import (
    complete_steps,
    differences,
    end,
    finish,
    log_file,
    metrics,
    run_folder,
    running,
    trained_steps,
    wait_for,
    write_config,
)
from forked import Forked

from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.checkpoint.verify import FULL, verify
from lmtrain.runtime.lock import FileLock

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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, settings())
    finish(folder)
    assert complete_steps(folder) == [*range(KEEP, LAST + 1, KEEP)], "\n".join(log_lines(folder))
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


def run_to_end(folder: Path, *flags: object, code: int, output: str = "output.txt") -> str:
    """Run to the end, which must be with exit code `code` and without a traceback. -> the output"""
    with running(folder, *flags, output=output) as process:
        found = process.wait(timeout=SECONDS)
    return checked(folder / output, found, code)


def checked(output: Path, found: int, code: int) -> str:
    """The text of the file `output`, which must have no traceback; the exit code `found` must be `code`."""
    text = output.read_text()
    assert found == code, text
    assert "Traceback" not in text
    return text


def log_lines(folder: Path) -> list[str]:
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


@dataclass(frozen=True)
class Space:
    """Disk space for checkpoints, which can be taken and given back while the process is paused or has ended."""

    take: Callable[[Forked], None]
    give: Callable[[Forked], None]


@contextlib.contextmanager
def space_on_a_disk(mount: Path) -> Iterator[Space | None]:
    """A small file system, which a file can fill to the last byte; None without the right to mount."""
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", mount], capture_output=True)
    if done.returncode:
        yield None
        return
    ballast = mount / "ballast"

    def take(_: Forked) -> None:
        with open(ballast, "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):  # smaller writes fill the rest of the last block
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    try:
        yield Space(take, lambda _: ballast.unlink())
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


@contextlib.contextmanager
def space_by_limit(most_bytes: int = 45_000) -> Iterator[Space]:
    """The kernel limits the file size of the process: the embedding is larger, logs are smaller."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    assert hard == resource.RLIM_INFINITY or hard > 100 * most_bytes

    def limit(process: Forked, size: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))

    yield Space(lambda process: limit(process, most_bytes), lambda process: limit(process, hard))


@pytest.fixture(params=["disk", pytest.param("limit", marks=pytest.mark.long)])
def space(request, folder) -> Iterator[Space]:
    disk = space_on_a_disk(folder / "checkpoints") if request.param == "disk" else contextlib.nullcontext()
    with disk as found, space_by_limit() as limit:
        yield found or limit


def full_at_step_ten(process: Forked, folder: Path, space: Space) -> None:
    wait_for(lambda: KEEP in complete_steps(folder), [process])
    with paused(process):
        space.take(process)
        assert LAST not in complete_steps(folder), "the run finished before the disk was full"


@pytest.mark.long
def test_a_full_disk_costs_later_checkpoints_only_and_the_resumed_run_ends_with_the_same_bytes(
    folder, space, undisturbed
):
    with running(folder, *NO_OTHER_LARGE_FILES, output=os.devnull) as process:
        full_at_step_ten(process, folder, space)
        code = process.wait(timeout=SECONDS)
        space.give(process)
    assert code == 1
    output = "\n".join(log_lines(folder))
    failed = re.findall(r"the checkpoint of step (\d+) could not be saved: ", output)
    endings = ("; training continues, and saving is retried", "; retrying now", "; this was the second attempt")
    assert [output.count(ending) for ending in endings] == [len(failed) - 2, 1, 1]
    assert failed[-2:] == [str(LAST), str(LAST)]  # twice: the last step is retried immediately
    last_line = f"lmtrain: error: the state after step {LAST} could not be saved, see above; run the same command"
    assert log_lines(folder)[-1].startswith(last_line), log_lines(folder)
    assert trained_steps(folder) == list(range(1, LAST + 1))
    kept = complete_steps(folder)
    assert KEEP in kept
    assert not {int(step) for step in failed} & set(kept)
    left = other_than_checkpoints(folder)
    assert f"resuming after step {kept[-1]} " in finish(folder, *NO_OTHER_LARGE_FILES)
    assert [found for found in differences(folder, undisturbed, LAST) if "export" not in found] == []
    assert left == set()


@pytest.mark.long
def test_when_disk_space_is_free_again_later_checkpoints_are_saved(folder, space):
    with running(folder, *NO_OTHER_LARGE_FILES, output=os.devnull) as process:
        full_at_step_ten(process, folder, space)
        wait_for(lambda: "training continues" in "\n".join(log_lines(folder)), [process])
        with paused(process):
            space.give(process)
            last_started = trained_steps(folder)[-1] // KEEP * KEEP
        code = process.wait(timeout=SECONDS)
    assert code == 0, log_lines(folder)
    output = "\n".join(log_lines(folder))
    failed = {int(step) for step in re.findall(r"the checkpoint of step (\d+) could not be saved", output)}
    assert failed
    assert max(failed) <= last_started + KEEP
    assert complete_steps(folder) == sorted(set(range(KEEP, LAST + 1, KEEP)) - failed)
    assert other_than_checkpoints(folder) == set()


AFTER_A_FAILURE = """
import contextlib, os, resource, sys
import jax.numpy as jnp
from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.checkpoint.policies import Kind

folder, by_limit = sys.argv[1], sys.argv[2] == "limit"
ballast = os.path.join(folder, "ballast")
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

def take():
    if by_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    else:
        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

def give():
    if by_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    else:
        os.unlink(ballast)

checkpointer = Checkpointer(os.path.join(folder, "run"), CheckpointerConfig())
params = {"params": {"w": jnp.arange(100_000.0)}}
for step, before in ((1, take), (2, give), (3, lambda: None)):
    before()
    checkpointer.save(step, Kind.PERMANENT, params, {})
    print(step, checkpointer.finish())
checkpointer.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disk", "limit"])
def test_the_save_after_a_failed_one_succeeds(tmp_path, kind):
    """It does not raise the previous error. Without the right to mount, both cases use the limit of the file size."""
    disk = space_on_a_disk(tmp_path / "disk") if kind == "disk" else contextlib.nullcontext()
    with disk as mounted:
        kind, place = ("disk", tmp_path / "disk") if mounted else ("limit", tmp_path)
        command = [sys.executable, "-c", AFTER_A_FAILURE, place, kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 False", "2 True", "3 True"], done.stderr[-3000:]


@pytest.mark.long
def test_a_failed_save_is_logged_in_one_line_without_tracebacks(folder):
    with running(folder, *NO_OTHER_LARGE_FILES) as process, space_by_limit() as space:
        full_at_step_ten(process, folder, space)
        process.wait(timeout=SECONDS)
    output = (folder / "output.txt").read_text()
    assert "training continues" in output
    assert "Traceback" not in output


@pytest.mark.long
def test_a_full_disk_ends_a_run_with_on_save_error_stop(folder, space):
    with running(folder, *NO_OTHER_LARGE_FILES, *STOP, output=os.devnull) as process:
        full_at_step_ten(process, folder, space)
        code = process.wait(timeout=SECONDS)
    assert code == 1
    (error,) = [line for line in log_lines(folder) if line.startswith("lmtrain: error: ")]
    assert re.match(r"lmtrain: error: the checkpoint of step \d+ could not be saved: ", error)
    assert error.endswith("(trainer.checkpointer.on_save_error: stop)")
    assert max(trained_steps(folder)) < LAST
    assert KEEP in complete_steps(folder)
    assert other_than_checkpoints(folder) == set()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("in the way")


@pytest.mark.long
@pytest.mark.parametrize(("flags", "continues"), [((), True), (STOP, False)], ids=["continue", "stop"])
@pytest.mark.parametrize("vanish", [shutil.rmtree, replace_by_file], ids=["deleted", "a file"])
def test_when_the_folder_of_checkpoints_vanishes_training_continues_or_stops_as_set(folder, vanish, flags, continues):
    """The next save is far from the first, so that none is under way when the folder vanishes, on any machine."""
    keep = '[{"every": 10, "until": 10}, {"every": 500}]'
    far = ("--trainer.num_train_steps", 510, "--trainer.checkpointer.keep", keep, *NO_OTHER_LARGE_FILES)
    with running(folder, *far, *flags) as process:
        wait_for(lambda: any(line.endswith(f"/step-{KEEP}") for line in log_lines(folder)), [process])  # "saved ..."
        with paused(process):
            vanish(folder / "checkpoints")
            assert trained_steps(folder)[-1] < 500
        code = process.wait(timeout=SECONDS)
    output = checked(folder / "output.txt", code, 1)
    failed = re.findall(r"the checkpoint of step (\d+) could not be saved", output)
    assert failed == (["500", "510", "510"] if continues else ["500"])
    steps = trained_steps(folder)
    assert steps == list(range(1, len(steps) + 1))
    assert (steps[-1] == 510) == continues


def test_a_second_start_of_a_run_is_refused_and_changes_nothing_and_after_a_kill_it_starts(folder):
    with running(folder, *ENDLESS) as first:
        wait_for(lambda: KEEP in complete_steps(folder), [first])
        with paused(first):
            before = contents(run_folder(folder), folder / "exports", folder / "cache"), log_file(folder).read_bytes()
            output = run_to_end(folder, *ENDLESS, code=2, output="second.txt")
            after = contents(run_folder(folder), folder / "exports", folder / "cache"), log_file(folder).read_bytes()
        end([first])
    holder = f"locked by another run with the same id (process {first.pid} on {socket.gethostname()})"
    assert holder in output.splitlines()[-1]
    assert after == before
    with running(folder, *ENDLESS, output="third.txt") as third:
        wait_for(lambda: any("resuming after step " in line for line in log_lines(folder)), [third])


def test_a_refused_start_does_not_change_the_config_in_the_log_folder(folder):
    """It is the config of the run that holds the lock; the refused start can have another."""
    kept = folder / "logs" / "one" / "config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text("the holder's\n")
    run_folder(folder).mkdir(parents=True)
    holder = FileLock(str(run_folder(folder) / "lock"))
    assert holder.acquire()
    try:
        run_to_end(folder, "--trainer.num_train_steps", 99, code=2)
    finally:
        holder.release()
    assert kept.read_text() == "the holder's\n"


def test_a_finished_run_has_nothing_to_do_and_changes_no_byte(undisturbed):
    places = [undisturbed / name for name in ("checkpoints", "exports", "cache")]
    before = contents(*places), log_file(undisturbed).read_bytes()
    output = run_to_end(undisturbed, code=0)
    assert f"nothing to do: {run_folder(undisturbed)}/step-{LAST} has all {LAST} steps" in output
    assert (contents(*places), log_file(undisturbed).read_bytes()) == before


def test_resuming_without_a_shard_of_the_cache_is_refused_with_its_name(folder, undisturbed):
    add_checkpoints(folder, undisturbed, KEEP)
    before = contents(run_folder(folder))
    shard = sorted((folder / "cache" / "train").glob("*.arrayrecord"))[1]
    shard.unlink()
    last = run_to_end(folder, code=2).splitlines()[-1]
    assert last.startswith(f"lmtrain: error: cache/train/{shard.name} is missing: the cache is corrupt; delete ")
    assert contents(run_folder(folder)) == before


@pytest.mark.long
def test_a_shard_deleted_as_advised_is_rebuilt_and_the_run_resumes(folder, undisturbed):
    add_checkpoints(folder, undisturbed, KEEP)
    shard = sorted((folder / "cache" / "train").glob("*.arrayrecord"))[1]
    for path in (*shard.parent.glob(f"{shard.stem}.*"), shard.parent / "manifest.json"):
        path.unlink()
    assert f"resuming after step {KEEP} " in finish(folder)
    assert differences(folder, undisturbed, LAST) == []


@pytest.mark.long
def test_a_run_continues_without_a_tracker_whose_folder_is_a_file(folder, undisturbed):
    (folder / "in_the_way").write_text("")
    changed = settings()
    changed["trainer"]["tracker"] = {"type": "tensorboard", "logdir": "in_the_way"}
    write_config(folder, changed)
    output = finish(folder)
    assert len(re.findall(r"tracker tensorboard: .*in_the_way.*; training continues without it", output)) == 1
    assert metrics(folder) == metrics(undisturbed)


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
        code = process.wait(timeout=SECONDS)
        waited = time.monotonic() - since
    output = checked(folder / "output.txt", code, 0)
    assert "W&B is not available (" in output
    assert list(folder.glob("logs/wandb/offline-run-*/run-*.wandb"))  # to be sent later
    assert "done: checkpoints in checkpoints/one" in output
    assert metrics(folder) == metrics(undisturbed)
    assert waited < 55


BACKWARDS = """
import time

forwards = time.time
began = forwards()
time.time = lambda: began - (forwards() - began)
"""


@pytest.mark.long
def test_a_wall_clock_that_runs_backwards_delays_no_save(folder):
    """Python reads `sitecustomize` before anything else."""
    (folder / "hooks").mkdir()
    (folder / "hooks" / "sitecustomize.py").write_text(BACKWARDS)
    path = os.pathsep.join([str(folder / "hooks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = ["--trainer.checkpointer.save_interval", "0.2s", "--trainer.checkpointer.keep", "[]"]
    output = finish(folder, "--trainer.num_train_steps", 300, "--hf_save_steps", 300, *flags, PYTHONPATH=path)
    saved = [int(step) for step in re.findall(r"saved .*/step-(\d+)", output)]
    assert len(saved) > 2
    assert saved == sorted(saved)
    assert complete_steps(folder) == [300]  # time-based saves are temporary
    stamps = [line.split(" ")[1] for line in (folder / "logs" / "one.log").read_text().splitlines() if line[:2] == "20"]
    assert stamps[-1] < stamps[0]  # the clock of the log did run backwards


def flip_a_byte(step: Path) -> None:
    """In the middle of the largest file, which holds arrays."""
    path = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(step: Path) -> None:
    path = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size - 1)


CORRUPTIONS = {
    "a flipped byte": flip_a_byte,
    "a truncated file": truncate,
    "no run.json": lambda step: (step / "run.json").unlink(),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "an empty manifest": lambda step: (step / "manifest.json").write_bytes(b""),
    "no parameters": lambda step: shutil.rmtree(step / "params"),
}
NOT_LONG = "a flipped byte"


@pytest.mark.parametrize(
    "corruption", [NOT_LONG, *(pytest.param(name, marks=pytest.mark.long) for name in CORRUPTIONS if name != NOT_LONG)]
)
def test_a_corrupt_checkpoint_is_set_aside_and_the_run_ends_with_the_same_bytes(folder, undisturbed, corruption):
    add_checkpoints(folder, undisturbed, 10, 20, 30)
    newest = run_folder(folder) / "step-30"
    CORRUPTIONS[corruption](newest)
    corrupt = {path.removeprefix(str(newest)): found for path, found in contents(newest).items()}
    output = finish(folder)
    assert f"{newest} is corrupt: " in output
    assert f"{newest} was set aside as damaged-step-30" in output
    assert "resuming after step 20 " in output
    aside = run_folder(folder) / "damaged-step-30"
    assert {path.removeprefix(str(aside)): found for path, found in contents(aside).items()} == corrupt
    shutil.rmtree(aside)
    assert differences(folder, undisturbed, LAST) == []


def test_when_all_checkpoints_are_corrupt_the_run_is_refused_and_no_byte_is_lost(folder, undisturbed):
    """Twice: the second start finds only the checkpoints that the first has set aside."""
    add_checkpoints(folder, undisturbed, 10, 20)
    for step in (10, 20):
        flip_a_byte(run_folder(folder) / f"step-{step}")
    places = (run_folder(folder), folder / "exports", log_file(folder).parent)
    before = contents(*places)
    for _ in range(2):
        last = run_to_end(folder, code=2).splitlines()[-1]
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
