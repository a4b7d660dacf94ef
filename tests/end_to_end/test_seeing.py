"""Metrics, trackers and the files of a run: every metric is logged once, even if trackers fail or the run is killed."""

import json
import math
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from conftest import log_lines, run_in_process, tiny_settings
from faults.runs import RUN, complete_steps, finish, last_logged, running, wait_for, write_config

from lmtrain.tracking.goodput import KINDS, NAME, read_attempts, total_seconds

pytestmark = pytest.mark.end_to_end

STEPS = 12
GOODPUT = {f"goodput/{kind}" for kind in (*KINDS, "lost", "down")}
TIMES = ("duration", "loading_time", "hook_time", "examples_per_second", "tokens_per_second", "total_tokens")
EVERY_STEP = {"train/loss", "train/learning_rate", "train/gradient_norm", "checkpoint/blocking_seconds"}
EVERY_STEP |= {f"throughput/{name}" for name in (*TIMES, "total_gflops", "gflops_per_second")}

TRACKERS = '''
import json, os, threading
from lmtrain.tracking import goodput
from lmtrain.tracking import tracker

goodput._SECONDS_BETWEEN_WRITES = 0.0  # write goodput at every step, including the last
tracker._HANGING_SECONDS = 600.0


def finish(tracker, original=tracker.BackgroundTracker.finish):
    """The tracker that hangs is abandoned at once, the others have their 30 s."""
    if "Hangs" in tracker._name:
        tracker.finish_seconds = 0.5
    original(tracker)


tracker.BackgroundTracker.finish = finish


class Quick:
    def __init__(self, run, folder, step, name):
        self._file = open(os.path.join(folder, name), "a")

    def _keep(self, verb, *values):
        self._file.write(json.dumps([verb, *values]) + "\\n")

    def hyperparameters(self, config):
        self._keep("hyperparameters", sorted(config))

    def log(self, metrics, step):
        self._keep("log", step, sorted(metrics))

    def summary(self, values):
        self._keep("summary", sorted(values))

    def artifact(self, path, name, kind):
        self._keep("artifact", path, name, kind)

    def finish(self):
        self._keep("finish")
        self._file.close()

    def text(self, texts, step):
        self._keep("text", step, sorted(texts))


class Raises(Quick):
    def log(self, metrics, step):
        if step == 3:
            raise RuntimeError("the cloud is gone")


class Hangs(Quick):
    def log(self, metrics, step):
        threading.Event().wait()
'''


def by_step(folder: Path) -> dict[int, dict]:
    """The metrics of each step, joined from several lines; each must be in the log once."""
    pairs = Counter((line["step"], name) for line in log_lines(folder) for name in line if name != "step")
    assert [pair for pair, count in pairs.items() if count > 1] == []
    found: dict[int, dict] = {}
    for line in log_lines(folder):
        found.setdefault(line["step"], {}).update(line)
    return found


def own(name: str) -> dict:
    return {"type": f"my_trackers.{name}", "arguments": {"name": f"{name}.jsonl"}}


def make(folder: Path, **trainer) -> None:
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": STEPS, "watch": {"interval": 4}, **trainer}
    write_config(folder, settings)
    (folder / "my_trackers.py").write_text(TRACKERS)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The folder and the output of a run with all trackers, two of them broken, a profile and norms."""
    trackers = [
        own("Raises"),
        {"type": "wandb", "mode": "offline", "project": "none"},
        {"type": "tensorboard"},
        {"type": "json"},
        own("Quick"),
        own("Hangs"),
    ]
    folder = tmp_path_factory.mktemp("seen")
    (folder / "my_trackers.py").write_text(TRACKERS)
    git = ["git", "-c", "user.name=one", "-c", "user.email=one@example.org"]
    for arguments in (["init", "-q"], ["add", "my_trackers.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    make(
        folder,
        tracker=trackers,
        profiler={"start_step": 2, "num_steps": 2},
        sample_prompts=["The first", ""],
        sample_length=5,
        checkpointer={"save_interval": None, "keep": [{"every": 1}]},
    )
    return folder, finish(folder)


def test_every_step_has_all_its_metrics_once(seen):
    found = by_step(seen[0])
    assert sorted(found) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert found[step].keys() >= EVERY_STEP, step
    assert "parameter_count" in found[0]
    assert [step for step in found if "grad/norm/blocks/1" in found[step]] == [4, 8, 12]
    assert [step for step in found if "eval/loss" in found[step]] == [6, 12]
    assert [step for step in found if "compile/seconds" in found[step]] == [1]
    assert "compile/tracing_seconds" in found[1]
    assert any("checkpoint/total_seconds" in metrics for metrics in found.values())
    assert found[STEPS]["throughput/total_tokens"] == STEPS * 4 * 32


def test_goodput_accounts_for_all_of_the_time(seen):
    found = by_step(seen[0])
    last = found[STEPS]
    assert {name for name in last if name.startswith("goodput/")} == GOODPUT
    assert sum(last[name] for name in GOODPUT) == pytest.approx(1.0)
    assert last["memory/host_peak_bytes"] > 2**20
    for kind in ("start_up", "compile", "data_wait", "steps", "evaluation", "save_blocking"):
        assert last[f"goodput/{kind}"] > 0, kind
    assert last["goodput/restore"] == last["goodput/lost"] == last["goodput/down"] == 0
    (attempt,) = read_attempts(str(seen[0] / "logs" / RUN / NAME))
    assert (attempt.first_step, attempt.last_step) == (0, STEPS)
    assert sum(attempt.seconds.values()) == pytest.approx(attempt.updated - attempt.started, rel=0.02, abs=0.5)
    assert attempt.facts["parameters"] == found[0]["parameter_count"]


def test_the_files_of_the_run_are_in_its_folder(seen):
    folder = seen[0] / "logs" / RUN
    assert "my_trackers.Hangs" in (folder / "config.yaml").read_text()
    (checkpoint, *_) = (seen[0] / "checkpoints" / RUN).glob("step-*/run.json")
    assert json.loads(checkpoint.read_text())["git"]["commit"]
    assert list(folder.glob("profiler/plugins/profile/*/*.xplane.pb"))
    assert list(folder.glob("profiler/plugins/profile/*/perfetto_trace.json.gz"))
    assert list(seen[0].glob("logs/wandb/offline-run-*/run-*.wandb"))
    assert list(seen[0].glob(f"tblogs/{RUN}/events.out.*"))


def test_a_custom_tracker_gets_all_metrics_of_the_json_log_and_the_samples_of_their_file(seen):
    folder, printed = seen
    assert "step 12: samples: 'The first' -> " in printed
    logs = folder / "logs" / RUN
    calls, samples = (
        [json.loads(line) for line in (logs / name).read_text().splitlines()]
        for name in ("Quick.jsonl", "samples.jsonl")
    )
    assert [(line["step"], line["prompt"]) for line in samples] == [
        (step, prompt) for step in (6, 12) for prompt in ("The first", "")
    ]
    assert [call[1:] for call in calls if call[0] == "text"] == [[step, ["", "The first"]] for step in (6, 12)]
    logged = [(step, names) for verb, step, *names in (call for call in calls if call[0] == "log")]
    assert logged == [(line["step"], [sorted(line.keys() - {"step"})]) for line in log_lines(seen[0])[1:]]
    artifacts = {kind: name for verb, *_, name, kind in (call for call in calls if call[0] == "artifact")}
    assert artifacts == {kind: f"{RUN}-{kind}" for kind in ("config", "profile")}
    verbs = [call[0] for call in calls if call[0] not in ("log", "text", "artifact")]
    assert verbs == ["hyperparameters", "summary", "finish"]


def test_the_error_of_a_tracker_is_logged_once_and_costs_no_step(seen):
    for output in (seen[1], (seen[0] / "logs" / f"{RUN}.log").read_text()):
        about = [line for line in output.splitlines() if "tracker " in line]
        assert len(about) == 2, about
        (raised,) = [line for line in about if "Raises" in line]
        (hung,) = [line for line in about if "Hangs" in line]
        assert "the cloud is gone" in raised
        assert "tracker my_trackers.Hangs: " in hung
        assert "Traceback" not in output
    assert complete_steps(seen[0]) == list(range(1, STEPS + 1))


def test_the_losses_are_bitwise_those_of_a_run_without_trackers(seen, tmp_path):
    make(tmp_path, tracker=[])
    run_in_process(["train", "tiny.json", "--trainer.id", RUN], tmp_path, code=0)
    alone, found = by_step(tmp_path), by_step(seen[0])
    names = ("train/loss", "train/learning_rate", "train/gradient_norm", "eval/loss")
    for step in range(1, STEPS + 1):
        assert [found[step].get(name) for name in names] == [alone[step].get(name) for name in names], step
    assert math.isfinite(alone[STEPS]["eval/loss"])


@pytest.mark.long
def test_after_a_kill_and_a_restart_every_metric_is_logged_once_and_lost_time_is_counted(tmp_path):
    saved, reached, forever = 4, 20, 1_000_000
    keep = {"save_interval": None, "keep": [{"every": saved, "until": saved}]}
    make(tmp_path, num_train_steps=forever, tracker=[own("Quick")], checkpointer=keep, steps_per_eval=50)
    folder = tmp_path
    with running(folder) as process:
        # either can come first: the asynchronous save of an early step, or a later step
        wait_for(lambda: complete_steps(folder) == [saved] and last_logged(folder) >= reached, [process])
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed_at = last_logged(folder)
    last = killed_at + 60  # with an evaluation in between, however fast the machine is
    output = finish(folder, "--trainer.num_train_steps", last)
    assert f"resuming after step {saved} " in output
    found = by_step(folder)
    assert sorted(found) == list(range(last + 1))
    for step in range(1, last + 1):
        assert "train/loss" in found[step]
        assert ("grad/norm/total" in found[step]) == (step % 4 == 0)
    assert [step for step in found if "compile/seconds" in found[step]] == [1, saved + 1]
    first, second = attempts = read_attempts(str(folder / "logs" / RUN / NAME))
    assert (first.first_step, second.first_step, second.last_step) == (0, saved, last)
    assert reached - 1 <= first.last_step <= killed_at + 1
    assert second.started > first.updated
    assert second.seconds["restore"] > 0
    seconds = total_seconds(attempts)
    share = (first.last_step - saved) / first.last_step
    assert seconds["lost"] == pytest.approx(share * first.seconds["steps"])
    assert seconds["down"] == pytest.approx(second.started - first.updated)
    assert found[last]["goodput/lost"] > 0
    assert found[last]["goodput/down"] > 0
    assert sum(found[last][name] for name in GOODPUT) == pytest.approx(1.0)
