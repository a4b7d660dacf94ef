"""Kill a run again and again, anywhere, and prove that it ends as if nothing had happened.

    .venv/bin/python tools/kill_fuzz.py [--kills 50] [--seed 0] [--steps 600] [--folder DIR]

A tiny run is made once undisturbed. The same run in another folder is killed with SIGKILL, workers too, and started
again, until it was killed so often; one that reaches its end before gives way to another in a fresh folder. Moments are
random: some time after the start, or after something appears in the run's folders: a step in the log, the mark of a
save or deletion, arrays, a manifest, a temporary file, an export.

Proved, else exit code 1: the final parameters, average and optimizer state, all metrics that are not of time, and all
exports are the same to the bit; no step is in the log twice or missing; nothing is left over in the run's folders; a
start goes on from the newest checkpoint that was complete when the one before it was killed.

And no kill costs more work than `save_interval` and one save. What a kill lost is the time to it from when the state
that the next start goes on with was taken (its checkpoint's oldest file), or from the first step of the killed process
if that came later: starting is not training. Allowed is the sum of `save_interval`, or what saving that checkpoint took
if that was longer, since a save waits for the one before; the time since the save began that the kill hit, if it hit
one; what the loop needs to find that a save is due, two rounds at most, for which the longest time between two logged
steps stands; and the longest time that this program did not look. All are measured, so a slow machine changes nothing.
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

SAVE_INTERVAL = 1.0  # of runs.full_settings

# What has to appear, None: the process; and the greatest delay after it, in seconds.
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
    """`stage`: what was going on, as the files show; `kept`: the step that the next start has to go on from."""

    moment: str
    stage: str
    reached: int
    kept: int
    lost: float
    allowed: float


class Watch:
    """What appears in a run's folder from now on."""

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
        """What was not there at the last look: paths, and steps as `step 12`."""
        now = time.time()
        self.longest_nap, self._looked_at = max(self.longest_nap, now - self._looked_at), now
        before, self._present = self._present, self._paths()
        return (self._present - before) | {f"step {step}" for step in self._new_steps(now)}

    def step_time(self, now: float) -> float:
        """The longest between two steps, the one under way with them."""
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
        """Those that this process has logged: it begins with a new file, of what is kept, and appends to that."""
        (file_before, read), (file_now, size) = self._log, self._log_now()
        if file_now != file_before:
            self._log = file_now, size
        if file_now != file_before or size == read:
            return []
        with open(runs.log_file(self._folder), "rb") as file:
            file.seek(read)
            lines = b"".join(file.read().rpartition(b"\n")[:2])  # none, if the first is not written to its end
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


def disturb(folder: Path, told: str, moment: str, times: int, delay: float) -> Kill | None:
    """Start, and kill `delay` seconds after `moment` was seen so many times. None: it reached its end before."""
    pattern, _ = MOMENTS[moment]
    watch = Watch(folder)
    due: float | None = None
    with runs.running(folder, told=told) as process:
        while due is None or time.time() < due:
            found = watch.look()
            times -= sum(fnmatch(name, pattern) for name in found) if pattern else times
            if times <= 0 and due is None:
                due = (time.time() if pattern else watch.began) + delay
            if process.poll() is not None:
                assert process.returncode == 0, (folder / told).read_text()
                return None
            time.sleep(0.001)
        runs.end([process])
        killed_at = time.time()
        if process.returncode == 0:
            return None
        assert process.returncode == -signal.SIGKILL, (folder / told).read_text()
    watch.look()  # what it still wrote
    kept = max(runs.complete_steps(folder), default=0)
    hit = " + ".join(stages(folder, watch, (folder / told).read_text()))
    return Kill(moment, hit, max(watch.steps, default=0), kept, *cost(folder, watch, kept, killed_at))


def stages(folder: Path, watch: Watch, told: str) -> list[str]:
    """What the process was doing, from what it left; several things at once."""
    place, complete = runs.run_folder(folder), runs.complete_steps(folder)
    tops = (place, folder / "logs", folder / "logs/one")
    temporary = [path for top in tops for path in top.glob("*.tmp*") if path.stat().st_mtime > watch.began]
    found = [f"writing {path.name.partition('.tmp')[0]}" for path in temporary]
    if not watch.steps:
        return ["start-up" if runs.continued_from(told) is None else "first step", *found]
    for step in (int(path.stem.removeprefix("step-")) for path in place.glob("step-*.partial")):
        names = listed(place / f"step-{step}")
        if step in complete:
            found.append("committed, mark left")
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
    """Seconds of training that the kill lost, and that it was allowed to."""
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
    """Whether each start went on from what the kill before it had left, as far as it came to say so."""
    if not kills:
        sys.exit("the run ended before it could be killed; give it more --steps")
    problems = []
    for (_, kill), told in zip(kills, [*(told for told, _ in kills[1:]), last], strict=True):
        said = (folder / told).read_text()
        if runs.continued_from(said) not in (None, kill.kept):
            problems.append(f"{told} went on from {runs.continued_from(said)}, step {kill.kept} was complete")
        problems += [
            f"{told} says {word!r}" for word in ("corrupt", "damaged", "set aside", "Traceback") if word in said
        ]
    problems += [
        f"{told}: a kill at step {kill.reached} lost {kill.lost:.2f} s, {kill.allowed:.2f} s are allowed"
        for told, kill in kills
        if kill.lost > kill.allowed
    ]
    return problems


def kill_a_run(folder: Path, most: int, deck: Iterator[str], dice: random.Random) -> tuple[list[Kill], list[str]]:
    """Kill a new run up to so many times, and let it end. -> the kills, and which starts were not right"""
    kills: list[tuple[str, Kill]] = []
    while True:
        told = f"start-{len(kills)}.txt"
        if len(kills) == most:
            runs.finish(folder, told=told)
            break
        moment = next(deck)
        kill = disturb(folder, told, moment, dice.randint(1, 2), dice.uniform(0, MOMENTS[moment][1]))
        if kill is None:
            break
        kills.append((told, kill))
        print(row(kill), flush=True)
    return [kill for _, kill in kills], check_starts(folder, kills, told)


def fuzz(folder: Path, kills: int, steps: int, dice: random.Random) -> tuple[list[Kill], list[str]]:
    """All kills, and what is wrong in words."""
    undisturbed, settings = folder / "undisturbed", runs.full_settings(steps)
    deck = (moment for _ in count() for moment in dice.sample(list(MOMENTS), len(MOMENTS)))
    made: list[Kill] = []
    problems: list[str] = []
    runs.write_config(undisturbed, settings)
    with runs.running(undisturbed) as beside:
        while len(made) < kills:
            run = folder / f"killed-after-{len(made)}"
            runs.write_config(run, settings)
            here, wrong = kill_a_run(run, kills - len(made), deck, dice)
            assert beside.wait() == 0, (undisturbed / "told.txt").read_text()
            wrong += runs.differences(run, undisturbed, steps)
            print(f"  at its end after {len(here)} kills: {len(wrong)} problems", flush=True)
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
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with runs.working_folder(chosen.folder) as folder:
        print(f"  {'after':<16}  {'hit':<42}   step   kept   lost       s  allowed")
        kills, problems = fuzz(folder, chosen.kills, chosen.steps, random.Random(chosen.seed))
    print(f"{len(kills)} kills; most lost {max(kill.lost for kill in kills):.2f} s", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
