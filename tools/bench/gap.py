"""How long the devices wait between two steps of a real run: data, metrics, trackers and all.

    .venv/bin/python tools/bench/gap.py [--steps 40]

Trains gpt2_nano as `lmtrain train` does, with all trackers that need no service, and lets `trainer.profiler` trace the
steps, without evaluation or saves in between. In the trace each operation of the compiled program is an event. The gap
between two steps is the time from the last of one to the first of the next with nothing running on any thread.
"""

import argparse
import glob
import itertools
import os
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

_BEFORE = 10  # steps that are not traced


def operations(folder: str) -> list[tuple[float, float]]:
    """Begin and end, in seconds, of every operation of the step's program, on whatever thread."""
    (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    found = []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and str(stats.get("hlo_module", "")).startswith("jit_step"):
                    found.append((event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9))
    return sorted(found)


def busy(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times with something running: overlapping spans put together."""
    merged: list[tuple[float, float]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps in the trace")
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
        running = busy(operations(os.path.join("logs", "gap", "profiler")))
    idle = sorted(later[0] - earlier[1] for earlier, later in itertools.pairwise(running))
    whole = running[-1][1] - running[0][0]
    largest = idle[-arguments.steps :]
    print(
        f"{arguments.steps} steps in {whole:.2f} s; nothing ran for {1000 * sum(idle):.1f} ms of it, "
        f"{100 * sum(idle) / whole:.2f} %; the {arguments.steps} longest waits, one for each step, make "
        f"{1e6 * sum(largest) / arguments.steps:.0f} us a step, {100 * sum(largest) / whole:.2f} % (goal 1 %)"
    )


if __name__ == "__main__":
    main()
