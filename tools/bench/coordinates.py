"""The coordinate check of `transfer` for all families and optimizers, over widths of 64 to 512.

    .venv/bin/python tools/bench/coordinates.py [NAME ...]

Prints the exponent of the width with which ten steps change the logits, without transfer and with it. About a quarter
of an hour on two cores.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from transfer.coordinates import MODELS, RATES, rate_of, slope

WIDTHS = (64, 128, 256, 512)


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        family, model = MODELS[name]
        for optimizer in RATES:
            rate = rate_of(family, optimizer)
            standard, transferred = (
                slope(family, {"type": optimizer}, rate, transfer, WIDTHS, **model) for transfer in (False, True)
            )
            print(f"{name}, {optimizer}: standard {standard:.2f}, transfer {transferred:.2f}", flush=True)


if __name__ == "__main__":
    main()
