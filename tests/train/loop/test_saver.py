"""A run's checkpoints and exports: their contents, their order, and the time they take."""

import pytest

from lmtrain.checkpoint.config import Kind
from lmtrain.tracking.goodput import HOOKS, SAVING
from lmtrain.train.step.state import TrainState

STATE = TrainState(4, params="params", opt_state="moments")


def seconds(run, section):
    return round(run.timer.seconds[section], 2)


@pytest.mark.parametrize("at_once", [False, True])
def test_what_was_logged_and_exported_is_complete_before_the_checkpoint(fake_run, at_once):
    run = fake_run(export_every=2)
    run.timer.begin_steps()
    saver = run.saver
    saver.export(STATE, 4)
    saver.save(STATE, 4, Kind.PERMANENT, at_once=at_once)
    how = "save_now" if at_once else "save"
    assert run.events == [
        *("export 4", "sync", f"{how} 4 permanent", "exported", "log checkpoint/blocking_seconds 4"),
    ]
    assert run.logged == {4: {"checkpoint/blocking_seconds": 0.25}}
    assert seconds(run, SAVING) == pytest.approx(0.05)


def test_a_run_without_exports(fake_run):
    run = fake_run()
    run.saver.export_missed(STATE, 4)
    run.saver.save(STATE, 4, Kind.TEMPORARY, at_once=False)
    run.saver.close(others_gone=False)
    assert run.events == ["sync", "save 4 temporary", "log checkpoint/blocking_seconds 4", "close"]


def test_run_info_has_what_evaluations_decided_and_whether_one_is_pending(fake_run):
    run = fake_run(early_stopping={"patience": 3}, checkpointer={"keep_best": {}})
    run.saver.save(STATE, 4, Kind.TEMPORARY, at_once=False)
    run.decisions.update(5, {"eval/loss": 2.0})
    run.saver.save(STATE, 5, Kind.TEMPORARY, at_once=False, evaluated=False)
    first, second = run.checkpointer.saved[4], run.checkpointer.saved[5]
    assert first["run"] == second["run"] == "info"
    assert first["parts"] == {"params": "params", "optimizer": "moments"}
    assert (first["best_step"], second["best_step"]) == (None, 5)
    assert second["decisions"] == run.decisions.state
    assert second["decisions"]["keep"]["value"] == 2.0
    assert "evaluation_pending" not in first
    assert second["evaluation_pending"] is True


@pytest.mark.parametrize(("missed", "events"), [((4,), ["export 4"]), ((2,), []), ((), [])])
def test_an_export_that_a_killed_run_missed_is_repeated(fake_run, missed, events):
    run = fake_run(export_every=2, missed=missed)
    run.saver.export_missed(STATE, 4)
    assert run.events == events


@pytest.mark.parametrize("durations", [[], [1.5], [1.0, 3.0, 2.0]])
def test_the_longest_of_the_completed_saves_is_logged(fake_run, durations):
    run = fake_run()
    run.timer.begin_steps()
    run.checkpointer.take_saved = lambda: durations
    run.saver.log_saved(9)
    assert run.logged == ({9: {"checkpoint/total_seconds": max(durations)}} if durations else {})
    assert seconds(run, HOOKS) == (0.01 if durations else 0)


@pytest.mark.parametrize("others_gone", [False, True])
def test_at_the_end_the_checkpoint_is_completed_unless_it_would_wait_for_lost_processes(fake_run, others_gone):
    run = fake_run(export_every=2)
    run.saver.close(others_gone)
    assert run.events == [*([] if others_gone else ["close"]), "exports finished"]


def test_the_export_is_completed_even_if_the_checkpoint_fails(fake_run):
    run = fake_run(export_every=2)

    def fail():
        raise OSError("disk full")

    run.at["close"] = fail
    with pytest.raises(OSError, match="disk full"):
        run.saver.close(others_gone=False)
    assert run.events == ["close", "exports finished"]
