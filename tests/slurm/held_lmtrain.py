"""`lmtrain` whose training waits at the step in the file `hold`, if there is one, until a signal has come."""

import sys
import time
from pathlib import Path

from lmtrain.__main__ import main
from lmtrain.train.loop.due import Due

_stop = Due.stop


def stop(due: Due, step: int) -> bool:
    while Path("hold").exists() and step >= int(Path("hold").read_text()) and not due._stop.requested:
        time.sleep(0.01)
    return _stop(due, step)


if __name__ == "__main__":
    Due.stop = stop
    sys.exit(main())
