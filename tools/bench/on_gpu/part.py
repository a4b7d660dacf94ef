"""Run one part of the GPU benchmark: `python tools/bench/on_gpu/part.py PART RESULTS SECONDS [--dry-run]`.

Appends what it finds to the file RESULTS. tools/bench/gpu.py starts it, and kills it after SECONDS.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

from on_gpu.results import write_result  # noqa: E402
from on_gpu.timing import Pace  # noqa: E402

# Fraction of the time after which measurements are no longer repeated.
SOFT = 0.75


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("results", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--dry-run", action="store_true")
    flags = parser.parse_args()
    deadline = began + SOFT * flags.seconds
    pace = Pace(deadline, rounds=2, least_seconds=0) if flags.dry_run else Pace(deadline)
    for result in importlib.import_module(f"on_gpu.{flags.part}").run(flags.dry_run, pace):
        write_result(flags.results, result)


if __name__ == "__main__":
    main()
