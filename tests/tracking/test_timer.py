"""Seconds by section, with a clock that the test controls."""

import contextlib

from lmtrain.tracking.goodput import EVALUATION, SAVING, SECTIONS, START_UP, STEPS, Timer


def test_all_time_belongs_to_one_section():
    """A nested section counts for the outer one, also up to an error."""
    now = [1000.0]

    def turn(seconds):
        now[0] += seconds

    timer = Timer(lambda: now[0])
    turn(3)
    timer.begin_steps()
    with contextlib.suppress(KeyError), timer.section(SAVING):
        turn(1)
        with timer.section(EVALUATION):
            turn(2)
        with timer.section(SAVING):
            turn(4)
        assert timer.seconds[SAVING] == 7  # nothing is counted twice
        turn(8)
        raise KeyError
    turn(16)
    assert timer.seconds == dict.fromkeys(SECTIONS, 0.0) | {START_UP: 3, SAVING: 15, STEPS: 16}
