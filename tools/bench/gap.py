"""Idle time of the devices between two steps of a real run, with data, metrics and trackers.

    .venv/bin/python tools/bench/gap.py [--steps 40]

Trains gpt2_nano as `lmtrain train` does, with all trackers that need no service, and traces steps with
`trainer.profiler`, without evaluation or saves in between. In the trace each operation of the compiled program is an
event with the id of its execution. The gap is the time from the last operation of one execution to the first of the
next.
"""

import argparse
import glob
import itertools
import os
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

_BEFORE = 10  # untraced steps at the start


def runs(folder: str) -> list[tuple[float, float]]:
    """Start and end, in seconds, of every execution of the step's program: of its operations on all threads."""
    (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    found: dict[int, tuple[float, float]] = {}
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and str(stats.get("hlo_module", "")).startswith("jit_step"):
                    begin, end = event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
                    first, last = found.get(stats["run_id"], (begin, end))
                    found[stats["run_id"]] = min(first, begin), max(last, end)
    return sorted(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="number of steps in the trace")
    arguments = parser.parse_args()
    from lmtrain.commands import train

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        steps = arguments.steps + _BEFORE + 2
        flags = ["--trainer.num_train_steps", str(steps), "--trainer.steps_per_eval", "1000000"]
        flags += ["--trainer.max_eval_batches", "1", "--trainer.id", "gap"]
        flags += ["--trainer.tracker", "[{type: tensorboard}, {type: wandb, mode: offline}]"]
        flags += ["--trainer.profiler", f"{{start_step: {_BEFORE}, num_steps: {arguments.steps}}}"]
        if train.run(["gpt2_nano", *flags]):
            sys.exit("the run failed")
        steps_run = runs(os.path.join("logs", "gap", "profiler"))
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(steps_run)]
    whole = steps_run[-1][1] - steps_run[0][0]
    print(
        f"{len(steps_run)} steps in {whole:.2f} s; gap between steps {1000 * sum(gaps) / len(gaps):.2f} ms on "
        f"average, {1000 * max(gaps):.2f} ms at most: {100 * sum(gaps) / whole:.2f} % of the time (goal: 1 %)"
    )


if __name__ == "__main__":
    main()
