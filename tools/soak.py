"""Leak test: train a tiny model for a long time and watch the memory, open files and threads of its process.

    .venv/bin/python tools/soak.py [--steps 2000] [--folder DIR]

The run saves every 2 s, evaluates every 100 steps and exports every 500. The process is sampled ten times a second;
each line of the table is the minimum since the previous line, since a save or an evaluation temporarily uses more. The
first quarter is warm-up of allocators and caches. After it nothing may grow: exit code 1 if every line of the last
quarter has more open files or threads than all of the second, or if memory grows by more than 20 MiB per 1000 steps, by
a linear fit. A leak of the state of 7 MiB at each of the ten or more saves would exceed this.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults import runs  # noqa: E402

LINES = 20
MOST_MIB_PER_1000_STEPS = 20.0


class Held(NamedTuple):
    """Resources of a process at one moment."""

    mib: float
    files: int
    threads: int


def settings(steps: int) -> dict:
    made = runs.full_settings(steps)
    made["model"] |= {"hidden_dim": 128}
    made["trainer"] |= {"steps_per_eval": 100, "checkpointer": {"save_interval": "2s", "keep": []}}
    return made | {"hf_save_steps": 500}


def look(pid: int) -> Held:
    place = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    return Held(int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(place / "fd")), int(status["Threads"]))


def soak(folder: Path, steps: int) -> list[tuple[int, Held]]:
    """At each of `LINES` evenly spaced steps, the minimum of each resource since the previous line."""
    runs.write_config(folder, settings(steps))
    lines: list[tuple[int, Held]] = []
    seen: list[Held] = []
    with runs.running(folder) as process:
        while len(lines) < LINES - 1:  # the process exits after the last step
            time.sleep(0.1)
            assert process.poll() is None, (folder / "output.txt").read_text()
            step = last_step(folder)
            if step:
                seen.append(look(process.pid))
            if step >= (len(lines) + 1) * steps // LINES:
                lines.append((step, Held(*(min(column) for column in zip(*seen, strict=True)))))
                print(row(*lines[-1]), flush=True)
                seen = []
        assert process.wait() == 0, (folder / "output.txt").read_text()
    return lines


def last_step(folder: Path) -> int:
    path = runs.log_file(folder)
    return sum(b"train/loss" in line for line in path.read_bytes().splitlines()) if path.exists() else 0


def row(step: int, held: Held) -> str:
    return f"{step:7} {held.mib:9.1f} {held.files:6} {held.threads:8}"


def slope(lines: list[tuple[int, Held]]) -> float:
    """MiB per 1000 steps, by a linear fit."""
    count = len(lines)
    step = sum(step for step, _ in lines) / count
    mib = sum(held.mib for _, held in lines) / count
    spread = sum((at - step) ** 2 for at, _ in lines)
    return 1000 * sum((at - step) * (held.mib - mib) for at, held in lines) / spread


def growth(lines: list[tuple[int, Held]]) -> list[str]:
    """The names of the resources that grow."""
    quarter = len(lines) // 4
    before, after, rise = lines[quarter : 2 * quarter], lines[-quarter:], slope(lines[quarter:])
    print(f"after the first quarter: {rise:+.2f} MiB per 1000 steps, maximum {MOST_MIB_PER_1000_STEPS:.0f}")
    grown = []
    for name in ("files", "threads"):
        if min(getattr(held, name) for _, held in after) > max(getattr(held, name) for _, held in before):
            grown.append(name)
    return grown + (["memory"] if rise > MOST_MIB_PER_1000_STEPS else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with runs.working_folder(chosen.folder) as folder:
        print("   step   RSS MiB  files  threads")
        lines = soak(folder, chosen.steps)
    grown = growth(lines)
    print(f"grows: {', '.join(grown)}" if grown else "nothing grows")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
