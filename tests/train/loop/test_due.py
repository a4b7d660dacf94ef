"""What is due after a step, from its number, from evaluations, and from requests."""

import pytest

from lmtrain.checkpoint.config import Kind
from lmtrain.evaluation.run import Evaluations
from lmtrain.runtime.logging import ALONE, Processes
from lmtrain.train.loop.due import LONG_STEP_SECONDS, Due
from lmtrain.train.step.norms import Agreement, Requests

LAST = 20
KEEP_FIVE = {"checkpointer": {"keep": [{"every": 5}], "save_interval": None}}


@pytest.fixture
def make(fake_run):
    """`make(evaluate_every, export_every, **trainer)`: the questions of a run of 20 steps, and the run."""

    def make(processes=ALONE, **settings):
        run = fake_run(LAST, processes=processes, **settings)
        setup = run.setup()
        agreement = Agreement(processes, setup.program.layout)
        return Due(LAST, Evaluations(run.evaluators, setup.evaluation), setup.saver, agreement, run.stop), run

    return make


def test_intervals_and_the_last_step(make):
    due, _ = make(evaluate_every=4, export_every=6, **KEEP_FIVE)
    answers = {}
    for step in range(1, LAST + 1):
        due.step_done()
        assert due.stop(step) is due.complete(step) is (step == LAST)
        answers[step] = bool(due.evaluations(step)), due.export(step), due.save(step) is Kind.PERMANENT
        assert due.anything(step) is any(answers[step])
    assert [[step for step in answers if answers[step][part]] for part in range(3)] == [
        [4, 8, 12, 16, 20],
        [6, 12, 18, 20],
        [5, 10, 15, 20],
    ]


def test_without_exports_evaluations_and_intervals_only_the_last_step_is_saved(make):
    due, _ = make()
    assert [step for step in range(1, LAST + 1) if due.anything(step)] == [LAST]


@pytest.mark.parametrize(
    ("request_of", "step", "expected"),
    [
        ("clock", 3, (Kind.TEMPORARY, False)),
        ("clock", 5, (Kind.PERMANENT, False)),
        ("signal", 3, (Kind.TEMPORARY, True)),
        ("signal", LAST, (Kind.PERMANENT, True)),
        ("interrupted evaluation", 3, (Kind.TEMPORARY, True)),
        ("interrupted evaluation", LAST, (Kind.PERMANENT, True)),
    ],
)
def test_a_request_is_granted_once_the_step_is_done(make, request_of, step, expected):
    due, run = make(**KEEP_FIVE)
    run.checkpointer.is_due = request_of == "clock"
    run.stop.requested = request_of == "signal"
    assert due.stop(step) is (step == LAST)
    due.step_done()
    due.evaluated = request_of != "interrupted evaluation"
    assert (due.save(step), due.stop(step)) == expected
    assert due.complete(step) is (step == LAST and due.evaluated)


def test_a_request_made_during_an_evaluation_or_export_counts_once_the_save_is_due(make):
    due, run = make()
    due.step_done()
    run.stop.requested = True
    assert not due.stop(3)
    assert due.save(3) is Kind.TEMPORARY
    assert due.stop(3)


def test_evaluations_decide_about_the_best_checkpoint_and_the_end(make):
    checkpointer = {"keep": [], "save_interval": None, "keep_best": {}}
    due, run = make(export_every=100, early_stopping={"patience": 1}, checkpointer=checkpointer)
    run.decisions.update(2, {"eval/loss": 1.0})
    assert (due.save(2), due.save(3)) == (Kind.TEMPORARY, None)
    run.decisions.update(4, {"eval/loss": 2.0})
    assert (due.export(4), due.save(4), due.stop(4), due.complete(4)) == (True, Kind.PERMANENT, True, True)


def test_the_host_waits_while_steps_are_long_and_until_one_is_known_to_be_short(make):
    due, _ = make()
    answers = [due.waits()]
    for seconds in (LONG_STEP_SECONDS, LONG_STEP_SECONDS + 1, 0.1):
        due.learn(1, None, seconds)
        answers.append(due.waits())
    assert answers == [True, False, True, False]


def test_requests_of_several_processes_come_from_the_step(make):
    due, run = make(processes=Processes(0, 2))
    run.checkpointer.is_due = run.stop.requested = True
    assert due.requests() == Requests(save=True, stop=True, wait=True)
    assert due.on_devices()[0].tolist() == [1, 1, 1]
    due.step_done()
    assert not due.anything(3)
    due.learn(3, [1, 0, 0], 0.1)
    due.step_done()
    assert (due.save(4), due.stop(4), due.waits()) == (Kind.TEMPORARY, False, False)
    due.saved(4)
    due.learn(4, [1, 1, 0], 0.1)  # the request for the checkpoint was made before it was saved
    due.step_done()
    assert (due.save(5), due.stop(5)) == (Kind.TEMPORARY, True)


@pytest.mark.parametrize(
    ("step", "seconds_to_next", "expected"),
    [(1, None, 5), (5, None, 10), (1, 60.0, 5), (1, 4.0, 4), (18, None, LAST), (LAST, 4.0, None)],
)
def test_the_next_checkpoint_is_estimated_from_steps_and_clock(make, step, seconds_to_next, expected):
    due, run = make(**KEEP_FIVE)
    run.checkpointer.seconds_to_next = seconds_to_next
    assert due.next_save(step, seconds_per_step=2.0) == expected


@pytest.mark.parametrize(("step", "expected"), [(1, 8), (8, 16), (17, LAST), (LAST, None)])
def test_the_next_evaluation_is_a_multiple_of_its_interval_or_the_last_step(make, step, expected):
    assert make(evaluate_every=8)[0].next_evaluation(step) == expected
