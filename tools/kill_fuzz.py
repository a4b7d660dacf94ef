"""Kill a run many times at random moments, and check that it ends as if it had not been killed.

    .venv/bin/python tools/kill_fuzz.py [--kills 50] [--seed 0] [--steps 600] [--lora | --moe] [--folder DIR]

A tiny run trains once undisturbed. The same run in another folder is killed with SIGKILL, including workers, and
restarted, until it was killed --kills times; if it finishes before, another run in a new folder replaces it. Moments
are random: some time after the start, or after an event in the run's folders: a step in the log, the marker of a save
or deletion, arrays, a manifest, a temporary file, an export.

Checks, with exit code 1 on failure: the final parameters, EMA and optimizer state, all metrics except times, and all
exports are bitwise identical; no step is in the log twice or missing; no files are left over in the run's folders; each
start resumes from the newest checkpoint that was complete when the previous process was killed.

A kill must also not lose more work than `save_interval` and one save. The lost work is the time from the snapshot of
the state from which the next start resumes (the oldest file of its checkpoint), or from the first step of the killed
process if that is later, to the kill: start-up is not training. The limit is the sum of: `save_interval`, or the
duration of saving that checkpoint if it is longer, since saves do not overlap; the time since the start of an
interrupted save, if any; two steps at most until the loop notices that a save is due, with the longest time between two
logged steps; and the longest time between two looks of this program. All of these are measured, so the check does not
depend on the machine's speed.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults import runs  # noqa: E402
from forked import end  # noqa: E402

SAVE_INTERVAL = 1.0  # as in runs.full_settings

# The event (None: start of the process), and the maximum delay after it in seconds.
MOMENTS: dict[str, tuple[str | None, float]] = {
    "start": (None, 7.0),
    "step": ("step *", 2.5),
    "save or deletion": ("checkpoints/one/step-*.partial", 0.1),
    "arrays": ("checkpoints/one/*orbax-checkpoint-tmp*", 0.2),
    "manifest": ("checkpoints/one/step-*/manifest.json*", 0.05),
    "evaluation": ("step *[05]0", 0.1),
    "export": ("exports/one/*.tmp-*", 0.1),
    "temporary": ("*.tmp*", 0.003),
}


@dataclass
class Kill:
    """One kill. `stage`: activity of the process, according to files; `kept`: the step from which to resume."""

    moment: str
    stage: str
    reached: int
    kept: int
    lost: float
    allowed: float


class Watch:
    """New files and steps in a run's folder from now on."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._log = self._log_now()
        self._present: set[str] = set()
        self._looked_at = self._step_at = self.began = time.time()
        self.steps: list[int] = []
        self.first_step_at = 0.0
        self.longest_step = self.longest_nap = 0.0
        self.look()

    def look(self) -> set[str]:
        """New events since the last look: paths, and steps as `step 12`."""
        now = time.time()
        self.longest_nap, self._looked_at = max(self.longest_nap, now - self._looked_at), now
        before, self._present = self._present, self._paths()
        return (self._present - before) | {f"step {step}" for step in self._new_steps(now)}

    def step_time(self, now: float) -> float:
        """The longest time between two steps, including the current one."""
        return max(self.longest_step, now - self._step_at)

    def _paths(self) -> set[str]:
        tops = ("logs", "logs/one", "exports/one", "checkpoints/one")
        found = {f"{top}/{name}" for top in tops for name in listed(self._folder / top)}
        saving = [path.removesuffix(".partial") for path in found if path.endswith(".partial")]
        return found | {f"{path}/{name}" for path in saving for name in listed(self._folder / path)}

    def _log_now(self) -> tuple[int, int]:
        path = runs.log_file(self._folder)
        return (path.stat().st_ino, path.stat().st_size) if path.exists() else (0, 0)

    def _new_steps(self, now: float) -> list[int]:
        """Steps logged by this process, which first rewrites the log with the kept steps, then appends to it."""
        (file_before, read), (file_now, size) = self._log, self._log_now()
        if file_now != file_before:
            self._log = file_now, size
        if file_now != file_before or size == read:
            return []
        with open(runs.log_file(self._folder), "rb") as file:
            file.seek(read)
            lines = b"".join(file.read().rpartition(b"\n")[:2])  # empty, if the first line is incomplete
        self._log = file_now, read + len(lines)
        steps = [entry["step"] for entry in map(json.loads, lines.splitlines()) if "train/loss" in entry]
        if steps:
            if self.steps:
                self.longest_step = max(self.longest_step, now - self._step_at)
            else:
                self.first_step_at = now
            self._step_at = now
        self.steps += steps
        return steps


def listed(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def disturb(folder: Path, output: str, moment: str, times: int, delay: float) -> Kill | None:
    """Start a process, and kill it `delay` seconds after `moment` was seen `times` times. None: it finished before."""
    pattern, _ = MOMENTS[moment]
    watch = Watch(folder)
    due: float | None = None
    with runs.running(folder, output=output) as process:
        while due is None or time.time() < due:
            found = watch.look()
            times -= sum(fnmatch(name, pattern) for name in found) if pattern else times
            if times <= 0 and due is None:
                due = (time.time() if pattern else watch.began) + delay
            if process.poll() is not None:
                assert process.returncode == 0, (folder / output).read_text()
                return None
            time.sleep(0.001)
        end([process])
        killed_at = time.time()
        if process.returncode == 0:
            return None
        assert process.returncode == -signal.SIGKILL, (folder / output).read_text()
    watch.look()  # last files of the process
    kept = max(runs.complete_steps(folder), default=0)
    hit = " + ".join(stages(folder, watch, (folder / output).read_text()))
    return Kill(moment, hit, max(watch.steps, default=0), kept, *cost(folder, watch, kept, killed_at))


def stages(folder: Path, watch: Watch, output: str) -> list[str]:
    """The activities of the process, according to its files."""
    place, complete = runs.run_folder(folder), runs.complete_steps(folder)
    tops = (place, folder / "logs", folder / "logs/one")
    temporary = [path for top in tops for path in top.glob("*.tmp*") if path.stat().st_mtime > watch.began]
    found = [f"writing {path.name.partition('.tmp')[0]}" for path in temporary]
    if not watch.steps:
        return ["start-up" if runs.resumed_from(output) is None else "first step", *found]
    for step in (int(path.stem.removeprefix("step-")) for path in place.glob("step-*.partial")):
        names = listed(place / f"step-{step}")
        if step in complete:
            found.append("committed, marker left")
        elif step < max(complete, default=0):
            found.append("deleting")
        elif any("manifest.json.tmp" in name for name in names):
            found.append("committing")
        else:
            found.append("checksums" if names else "writing arrays")
    if any(".tmp-" in name for name in listed(folder / "exports/one")):
        found.append("exporting")
    last = json.loads(runs.log_file(folder).read_bytes().rpartition(b"\n")[0].splitlines()[-1])
    if last["step"] % 50 == 0 and "train/loss" in last:
        found.append("evaluating")
    return found or ["training"]


def cost(folder: Path, watch: Watch, kept: int, killed_at: float) -> tuple[float, float]:
    """Seconds of training that the kill lost, and the limit."""
    if not watch.steps:
        return 0.0, 0.0
    since, interval = watch.first_step_at, SAVE_INTERVAL
    if kept:
        files = runs.run_folder(folder) / f"step-{kept}"
        taken = min(path.stat().st_mtime for path in files.rglob("*") if path.is_file())
        since = max(since, taken)
        interval = max(interval, json.loads((files / "manifest.json").read_text())["saved"] - taken)
    marks = runs.run_folder(folder).glob("step-*.partial")
    saves = [path.stat().st_mtime for path in marks if int(path.stem.removeprefix("step-")) > kept]
    allowed = interval + 2 * watch.step_time(killed_at) + watch.longest_nap
    return killed_at - since, allowed + killed_at - min(saves, default=killed_at)


def check_starts(folder: Path, kills: list[tuple[str, Kill]], last: str) -> list[str]:
    """Problems of starts: each must resume from the checkpoint that the previous kill left, if it logged that."""
    if not kills:
        sys.exit("the run finished before it could be killed; increase --steps")
    problems = []
    for (_, kill), output in zip(kills, [*(output for output, _ in kills[1:]), last], strict=True):
        text = (folder / output).read_text()
        if runs.resumed_from(text) not in (None, kill.kept):
            problems.append(f"{output} resumed from {runs.resumed_from(text)}, but step {kill.kept} was complete")
        problems += [
            f"{output} contains {word!r}" for word in ("corrupt", "damaged", "set aside", "Traceback") if word in text
        ]
    problems += [
        f"{output}: a kill at step {kill.reached} lost {kill.lost:.2f} s, limit {kill.allowed:.2f} s"
        for output, kill in kills
        if kill.lost > kill.allowed
    ]
    return problems


def kill_a_run(folder: Path, most: int, deck: Iterator[str], dice: random.Random) -> tuple[list[Kill], list[str]]:
    """Kill a new run at most `most` times, then let it finish. -> kills, problems of starts"""
    kills: list[tuple[str, Kill]] = []
    while True:
        output = f"start-{len(kills)}.txt"
        if len(kills) == most:
            runs.finish(folder, output=output)
            break
        moment = next(deck)
        kill = disturb(folder, output, moment, dice.randint(1, 2), dice.uniform(0, MOMENTS[moment][1]))
        if kill is None:
            break
        kills.append((output, kill))
        print(row(kill), flush=True)
    return [kill for _, kill in kills], check_starts(folder, kills, output)


def fuzz(folder: Path, kills: int, settings: dict, dice: random.Random) -> tuple[list[Kill], list[str]]:
    """All kills of runs with these settings, and the problems found."""
    undisturbed = folder / "undisturbed"
    steps = settings["trainer"]["num_train_steps"]
    moments = [moment for moment in MOMENTS if moment != "export" or "hf_save_path" in settings]
    deck = (moment for _ in count() for moment in dice.sample(moments, len(moments)))
    made: list[Kill] = []
    problems: list[str] = []
    runs.write_config(undisturbed, settings)
    with runs.running(undisturbed) as reference:
        while len(made) < kills:
            run = folder / f"killed-after-{len(made)}"
            runs.write_config(run, settings)
            here, wrong = kill_a_run(run, kills - len(made), deck, dice)
            assert reference.wait() == 0, (undisturbed / "output.txt").read_text()
            wrong += runs.differences(run, undisturbed, steps)
            print(f"  finished after {len(here)} kills: {len(wrong)} problems", flush=True)
            made += here
            problems += [f"{run.name}: {problem}" for problem in wrong]
    return made, problems


def row(kill: Kill) -> str:
    lost = f"{kill.reached - kill.kept if kill.reached else 0:6} {kill.lost:7.2f} {kill.allowed:7.2f}"
    return f"  {kill.moment:<16}  {kill.stage:<42} {kill.reached:6} {kill.kept:6} {lost}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--lora", action="store_true", help="train adapters on a frozen base")
    kinds.add_argument("--moe", action="store_true", help="train a mixture of experts that a bias balances")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with runs.working_folder(chosen.folder) as folder:
        print(f"  {'after':<16}  {'hit':<42}   step   kept   lost       s  allowed")
        if chosen.lora:
            settings = runs.lora_settings(chosen.steps, folder / "base")
        else:
            settings = runs.moe_settings(chosen.steps) if chosen.moe else runs.full_settings(chosen.steps)
        kills, problems = fuzz(folder, chosen.kills, settings, random.Random(chosen.seed))
    print(f"{len(kills)} kills; most lost {max(kill.lost for kill in kills):.2f} s", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
