"""How long the devices wait between two steps of a real run: data, metrics, trackers and all.

    .venv/bin/python tools/bench/gap.py [--steps 30] [--folder DIR]

Trains gpt2_nano in this process under JAX's profiler, without evaluation or saves in between, and reads from the trace
when each step's program ran. The gap is the time from the end of one to the beginning of the next; the first ten steps
are left out. On several CPU threads a program runs on all of them: its span is that of the executor's outermost event.
"""

import argparse
import glob
import itertools
import os
import sys
import tempfile
from statistics import median

import jax


def spans(folder: str, steps: int) -> list[tuple[float, float]]:
    """Begin and end in seconds of the executions of the program that took most time in all."""
    (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    by_program: dict[str, list[tuple[float, float]]] = {}
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                if "Execut" in event.name:
                    span = (event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9)
                    by_program.setdefault(f"{event.name} on {plane.name}", []).append(span)
    for name, found in sorted(by_program.items(), key=lambda item: -sum(b - a for a, b in item[1]))[:6]:
        print(f"  {name}: {len(found)} times, {sum(b - a for a, b in found):.2f} s", file=sys.stderr)
    longest = {name: [s for s in found if s[1] - s[0] > 0.02] for name, found in by_program.items()}
    chosen = max(longest.values(), key=lambda found: sum(b - a for a, b in found))
    return sorted(chosen)[-steps:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    folder = arguments.folder or tempfile.mkdtemp()
    os.chdir(folder)
    from lmtrain.commands import train

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    flags = ["--trainer.num_train_steps", str(arguments.steps), "--trainer.steps_per_eval", "1000000"]
    flags += ["--trainer.max_eval_batches", "1", "--trainer.tracker", "{type: json}", "--trainer.id", "gap"]
    with jax.profiler.trace(os.path.join(folder, "trace"), profiler_options=options):
        code = train.run(["gpt2_nano", *flags])
    assert code == 0
    ran = spans(os.path.join(folder, "trace"), arguments.steps - 10)
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(ran)]
    took = [end - begin for begin, end in ran]
    print(
        f"{len(ran)} steps of {1000 * median(took):.0f} ms; gap {1e6 * median(gaps):.0f} us in the median, "
        f"{1e6 * max(gaps):.0f} us at most: {100 * sum(gaps) / (ran[-1][1] - ran[0][0]):.3f} % of the time (goal 1 %)"
    )


if __name__ == "__main__":
    main()
