"""Early stopping, and the checkpoint with the best evaluation: also across a resume."""

import numpy as np
import pytest
from conftest import logged
from faults.runs import complete_steps

pytestmark = pytest.mark.end_to_end


def test_the_best_checkpoint_is_kept_and_the_run_ends_when_it_no_longer_improves(
    settings, write_config, run_cli, tmp_path
):
    """The evaluation loss falls, and then rises: the learning rate becomes far too high."""
    large = {"min_delta": 1.0}
    settings["trainer"] |= {"num_train_steps": 60, "steps_per_eval": 2, "id": "one"}
    settings["trainer"]["early_stopping"] = {"patience": 3, **large}
    settings["trainer"]["checkpointer"] = {"save_interval": None, "keep": [], "keep_best": large}
    settings["optimizer"] = {"learning_rate": 0.3, "warmup": 0, "lr_schedule": "constant", "max_grad_norm": None}
    write_config(settings)
    output = run_cli("train", "tiny.yaml", code=0).stderr
    found = logged(tmp_path, "eval/loss")
    last = max(found)
    best = last - 3 * 2
    assert 2 < best < last < 60
    expected, lowest = 0, np.inf
    for step, loss in sorted(found.items()):  # which are others on another processor
        expected, lowest = (step, loss) if loss < lowest - 1 else (expected, lowest)
    assert best == expected
    assert complete_steps(tmp_path) == [best, last]
    assert f"early stopping after step {last}" in output
    again = run_cli("train", "tiny.yaml", code=0).stderr
    assert f"step-{last} has {last} steps, as early stopping" in again
    more = run_cli("train", "tiny.yaml", "--trainer.early_stopping.patience", "5", code=0).stderr
    assert f"early stopping after step {last + 4}" in more
    assert complete_steps(tmp_path) == [best, last, last + 4]


def test_a_metric_that_is_nan_in_every_evaluation_ends_the_run_as_any_early_stop_does(
    settings, write_config, run_cli, tmp_path
):
    settings["trainer"] |= {"num_train_steps": 60, "steps_per_eval": 2, "id": "one", "early_stopping": {"patience": 2}}
    settings["trainer"] |= {"crash_on_nan": False, "crash_on_inf": False}
    settings["trainer"]["checkpointer"] = {"save_interval": None, "keep": [], "keep_best": {}}
    settings["optimizer"] = {"learning_rate": 1e30, "warmup": 0, "lr_schedule": "constant", "max_grad_norm": None}
    write_config(settings)
    output = run_cli("train", "tiny.yaml", "--hf_save_path", "exports", code=0).stderr
    assert "early stopping after step 4: " in output
    assert complete_steps(tmp_path) == [4]
    assert (tmp_path / "exports" / "one" / "step-4" / "config.json").exists()
