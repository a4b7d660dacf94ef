"""The program `lmtrain`, also `python -m lmtrain`: signals get their handlers before anything slow is imported."""

import gc

from lmtrain.runtime.output import open_descriptors
from lmtrain.runtime.signals import end_at_once


def main() -> None:
    """Run the command of `sys.argv`, and exit with its code."""
    open_descriptors()
    end_at_once()
    # imports and tracing make millions of objects that stay: with Python's thresholds, searching them for cycles takes
    # a tenth of the start
    gc.set_threshold(50_000, 20, 50)
    from lmtrain.cli import main as run

    run()


if __name__ == "__main__":
    main()
