"""Metrics, trackers and the files of a run: every metric is logged once, even if trackers fail or the run is killed."""

import json
import math
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from conftest import tiny_settings
from faults.runs import RUN, complete_steps, finish, log_file, running, wait_for, write_config

from lmtrain.tracking.goodput import KINDS, NAME, read_attempts, total_seconds

pytestmark = pytest.mark.end_to_end

STEPS = 12
GOODPUT = {f"goodput/{kind}" for kind in (*KINDS, "lost", "down")}
EVERY_STEP = {
    *("train/loss", "train/learning_rate", "train/gradient_norm"),
    *(
        f"throughput/{name}"
        for name in (
            *("duration", "loading_time", "hook_time", "examples_per_second", "tokens_per_second", "total_tokens"),
            *("total_gflops", "gflops_per_second"),
        )
    ),
    "checkpoint/blocking_seconds",
}

TRACKERS = '''
import json, os, threading
from lmtrain.tracking import background, goodput

goodput._SECONDS_BETWEEN_WRITES = 0.0  # write goodput at every step, including the last
background._HANGING_SECONDS = 600.0


def finish(tracker, original=background.BackgroundTracker.finish):
    """The tracker that hangs is abandoned after 3 s, the others have their 30."""
    if "Hangs" in tracker._name:
        tracker.finish_seconds = 3.0
    original(tracker)


background.BackgroundTracker.finish = finish


class Quick:
    """Works."""

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


def settings(steps: int = STEPS, **trainer) -> dict:
    found = tiny_settings()
    found["trainer"] |= {"num_train_steps": steps, "watch": {"interval": 4}, **trainer}
    return found


def make(folder: Path, trainer_settings: dict) -> Path:
    write_config(folder, trainer_settings)
    (folder / "my_trackers.py").write_text(TRACKERS)
    return folder


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in log_file(folder).read_text().splitlines()]


def by_step(folder: Path) -> dict[int, dict]:
    """The metrics of each step, joined from several lines; each must be in the log once."""
    pairs = Counter((line["step"], name) for line in lines(folder) for name in line if name != "step")
    assert [pair for pair, count in pairs.items() if count > 1] == []
    found: dict[int, dict] = {}
    for line in lines(folder):
        found.setdefault(line["step"], {}).update(line)
    return found


def last_logged(folder: Path) -> int:
    """The last step with a complete line in the log; 0 before the first."""
    if not log_file(folder).exists():
        return 0
    complete = [line for line in log_file(folder).read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((json.loads(line)["step"] for line in complete), default=0)


def own(name: str) -> dict:
    return {"type": f"my_trackers.{name}", "arguments": {"name": f"{name}.jsonl"}}


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
    folder = make(
        tmp_path_factory.mktemp("seen"),
        settings(
            tracker=trackers,
            profiler={"start_step": 2, "num_steps": 2},
            sample_prompts=["The first", ""],
            sample_length=5,
            checkpointer={"save_interval": None, "keep": [{"every": 1}]},
        ),
    )
    git = ["git", "-c", "user.name=one", "-c", "user.email=one@example.org"]
    for arguments in (["init", "-q"], ["add", "my_trackers.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    return folder, finish(folder)


def test_samples_of_each_evaluation_are_in_their_file_and_in_trackers(seen):
    folder, printed = seen
    found = [json.loads(line) for line in (folder / "logs" / RUN / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (6, 12) for prompt in ("The first", "")
    ]
    assert all(type(line["text"]) is str for line in found)
    assert "step 12: samples: 'The first' -> " in printed
    calls = [json.loads(line) for line in (folder / "logs" / RUN / "Quick.jsonl").read_text().splitlines()]
    assert [call[1:] for call in calls if call[0] == "text"] == [[step, ["", "The first"]] for step in (6, 12)]


def test_every_step_has_all_its_metrics_once(seen):
    found = by_step(seen[0])
    assert sorted(found) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert found[step].keys() >= EVERY_STEP, step
    assert "parameter_count" in found[0]
    assert [step for step in found if "eval/loss" in found[step]] == [6, 12]
    assert [step for step in found if "compile/seconds" in found[step]] == [1]
    assert {"compile/tracing_seconds", "compile/hlo_bytes"} < found[1].keys()
    assert any("checkpoint/total_seconds" in metrics for metrics in found.values())
    assert found[STEPS]["throughput/total_tokens"] == STEPS * 4 * 32


def test_norms_are_logged_at_their_interval_and_agree_with_the_gradient_norm_of_the_step(seen):
    found = by_step(seen[0])
    names = {f"{tree}/norm/{name}" for tree in ("grad", "params") for name in ("total", "blocks/0", "blocks/1")}
    assert [step for step in found if names & found[step].keys()] == [4, 8, 12]
    for step in (4, 8, 12):
        assert {name for name in found[step] if "/norm/" in name} == names
        assert found[step]["grad/norm/total"] == pytest.approx(found[step]["train/gradient_norm"], rel=1e-5)


def test_goodput_accounts_for_all_of_the_time(seen):
    found = by_step(seen[0])
    with_goodput = [metrics for metrics in found.values() if "goodput/steps" in metrics]
    assert with_goodput[-1]["step"] == STEPS
    assert len(with_goodput) > 2
    for metrics in with_goodput:
        assert {name for name in metrics if name.startswith("goodput/")} == GOODPUT
        assert sum(metrics[name] for name in GOODPUT) == pytest.approx(1.0)
        assert min(metrics[name] for name in GOODPUT) >= 0
        assert metrics["memory/host_peak_bytes"] > 2**20
    last = with_goodput[-1]
    for kind in ("start_up", "compile", "data_wait", "steps", "evaluation", "save_blocking"):
        assert last[f"goodput/{kind}"] > 0, kind
    assert last["goodput/restore"] == last["goodput/lost"] == last["goodput/down"] == 0
    (attempt,) = read_attempts(str(seen[0] / "logs" / RUN / NAME))
    assert (attempt.first_step, attempt.last_step) == (0, STEPS)
    assert sum(attempt.seconds.values()) == pytest.approx(attempt.updated - attempt.started, rel=0.02, abs=0.5)
    # the last metrics follow the last evaluation: later time is in neither of the two kinds
    evaluation, data = (attempt.seconds[kind] for kind in ("evaluation", "data_wait"))
    assert last["goodput/evaluation"] / last["goodput/data_wait"] == pytest.approx(evaluation / data)
    assert attempt.facts["parameters"] == found[0]["parameter_count"]


def test_the_files_of_the_run_are_in_its_folder(seen):
    folder = seen[0] / "logs" / RUN
    assert "my_trackers.Hangs" in (folder / "config.yaml").read_text()
    assert json.loads((folder / "code" / "git.json").read_text())["commit"]
    assert list(folder.glob("profiler/plugins/profile/*/*.xplane.pb"))
    assert list(folder.glob("profiler/plugins/profile/*/perfetto_trace.json.gz"))
    assert list(seen[0].glob("logs/wandb/offline-run-*/run-*.wandb"))
    assert list(seen[0].glob(f"tblogs/{RUN}/events.out.*"))


def test_a_custom_tracker_gets_all_metrics_of_the_json_log(seen):
    calls = [json.loads(line) for line in (seen[0] / "logs" / RUN / "Quick.jsonl").read_text().splitlines()]
    logged = [(step, names) for verb, step, *names in (call for call in calls if call[0] == "log")]
    assert logged == [(line["step"], [sorted(line.keys() - {"step"})]) for line in lines(seen[0])[1:]]
    artifacts = {kind: name for verb, *_, name, kind in (call for call in calls if call[0] == "artifact")}
    assert artifacts == {kind: f"{RUN}-{kind}" for kind in ("config", "code", "profile")}
    assert [call[0] for call in calls if call[0] not in ("log", "text", "artifact")] == [
        "hyperparameters",
        "summary",
        "finish",
    ]


def test_the_error_of_a_tracker_is_logged_once_and_costs_no_step(seen):
    for output in (seen[1], (seen[0] / "logs" / f"{RUN}.log").read_text()):
        about = [line for line in output.splitlines() if "tracker " in line]
        assert len(about) == 2, about
        (raised,) = [line for line in about if "Raises" in line]
        (hung,) = [line for line in about if "Hangs" in line]
        assert raised.endswith(
            "tracker my_trackers.Raises: RuntimeError: the cloud is gone; training continues without it"
        )
        assert "tracker my_trackers.Hangs: still busy after " in hung
        assert "Traceback" not in output
    assert complete_steps(seen[0]) == list(range(1, STEPS + 1))


def test_the_losses_are_bitwise_those_of_a_run_without_trackers(seen, tmp_path):
    finish(make(tmp_path, settings(tracker=[])))
    alone, found = by_step(tmp_path), by_step(seen[0])
    names = ("train/loss", "train/learning_rate", "train/gradient_norm", "eval/loss")
    for step in range(1, STEPS + 1):
        assert [found[step].get(name) for name in names] == [alone[step].get(name) for name in names], step
    assert math.isfinite(alone[STEPS]["eval/loss"])


@pytest.mark.long
def test_after_a_kill_and_a_restart_every_metric_is_logged_once_and_lost_time_is_counted(tmp_path):
    saved, reached, forever = 4, 20, 1_000_000
    keep = {"save_interval": None, "keep": [{"every": saved, "until": saved}]}
    folder = make(tmp_path, settings(forever, tracker=[own("Quick")], checkpointer=keep, steps_per_eval=50))
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


@pytest.mark.long
def test_xla_dumps_are_saved_with_the_run(tmp_path):
    tracker = {"type": "wandb", "mode": "disabled", "save_code": False, "save_xla_dumps": True}
    # without a compilation cache: XLA dumps nothing for programs that come from it
    write_config(tmp_path, settings(3, tracker=tracker, jax_compilation_cache_dir=None))
    finish(tmp_path, XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_dump_to=dumps")
    dumped = {path.name for path in (tmp_path / "dumps").iterdir()}
    kept = {path.name for path in (tmp_path / "logs" / RUN / "xla_dumps").iterdir()}
    assert kept == dumped
    assert [name for name in kept if "jit_step" in name]
