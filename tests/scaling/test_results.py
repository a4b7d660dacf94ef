"""The state of a ladder is what the logs of its runs say."""

import json

import pytest
from scaling.made_ladder import BASE, LAW, dirs, write_ladder, write_log, write_results

from lmtrain.commands.scaling import read_fit, read_ladder
from lmtrain.runtime.errors import UserError
from lmtrain.scaling.fitted import check_data, fit_ladder
from lmtrain.scaling.points import points, trials
from lmtrain.scaling.results import check, read_results, read_speed, stages
from lmtrain.scaling.runner import train_all

WANDB = {"type": "wandb", "settings": {"api_key": "key-of-wandb"}}
RATES = {"learning_rates": [5e-3, 1e-2, 2e-2]}


def test_a_ladder_begins_with_its_learning_rates(tmp_path):
    ladder = read_ladder(write_ladder(tmp_path, **RATES), None)
    results = read_results(ladder)
    assert results.law == []
    assert [len(stage) for stage in stages(results)] == [3]
    assert {result.state for result in results.all} == {"not started"}


def test_the_best_rate_decides_the_runs_of_the_law(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path, **RATES), done=lambda point: point.size == 0)
    results = read_results(ladder)
    assert {result.point.rate for result in results.law} == {1e-2}
    left = stages(results)
    assert [len(stage) for stage in left] == [3, 6]  # the longest run of three sizes, then those that branch off
    assert all(point.parent is None for point in left[0])
    assert {point.parent for point in left[1]} == {point.id for point in left[0]}
    assert len(results.all) == 3 + 11


def test_a_run_is_done_when_its_last_step_was_evaluated(tmp_path):
    ladder = read_ladder(write_ladder(tmp_path), None)
    one, other, *_ = points(ladder, [1e-2] * 4)
    write_log(tmp_path, one, 3.0)
    write_log(tmp_path, other, 3.0, steps=other.steps - 1)
    results = read_results(ladder)
    assert [result.state for result in results.law[:3]] == ["done", f"at step {other.steps - 1:,}", "not started"]
    assert [result.loss for result in results.law[:3]] == [3.0, None, None]


def test_a_learning_rate_at_which_the_loss_diverges_is_left_out(tmp_path):
    ladder = read_ladder(write_ladder(tmp_path, **RATES), None)
    for trial in trials(ladder):
        write_log(tmp_path, trial, 3.0 + trial.rate)
    *_, highest = trials(ladder)
    with open(tmp_path / "logs" / f"{highest.id}.metrics.jsonl", "w") as file:
        file.write('{"step": 1, "train/loss": 5.0}\n{"step": 2, "train/loss": null}\n')
    results = read_results(ladder)
    assert [result.state for result in results.trials] == ["done", "done", "diverged"]
    assert {result.point.rate for result in results.law} == {5e-3}
    assert highest.id not in {point.id for stage in stages(results) for point in stage}
    for trial in trials(ladder):
        write_log(tmp_path, trial, float("nan"))
    with pytest.raises(UserError, match="all learning_rates diverge; add lower ones"):
        read_results(ladder)


def test_a_run_of_the_law_that_has_diverged_is_an_error(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    point = points(ladder, [1e-2] * 4)[4]
    for loss in (float("nan"), float("inf"), 0.0, -1.0):
        write_log(tmp_path, point, loss)
        with pytest.raises(UserError, match=f"{point.id} has diverged; add lower learning_rates"):
            fit_ladder(ladder, read_results(ladder), None)


def test_runs_of_another_rate_are_checked_before_the_first_run(tmp_path):
    path = write_ladder(tmp_path, **RATES)
    ladder = read_ladder(path, None)
    point = points(ladder, [2e-2] * 4)[4]
    write_log(tmp_path, point, 3.0)
    config = ladder.load(point.settings, point.id).model_dump(mode="json")
    config["optimizer"]["weight_decay"] = 0.3
    (tmp_path / "logs" / point.id).mkdir()
    (tmp_path / "logs" / point.id / "config.yaml").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{point.id} was trained with other settings: optimizer.weight_decay 0.3"):
        train_all(ladder, lambda: True)


def test_a_branch_without_its_checkpoint_is_an_error_before_it_starts(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path), done=lambda point: point.ratio != 10)
    (point, *_) = [result.point for result in read_results(ladder).law if result.state != "done"]
    with pytest.raises(UserError, match=f"{point.id} starts from .*step-{point.start}, which is no complete"):
        train_all(ladder, lambda: True)


@pytest.mark.parametrize("line", ["garbage", '{"step": "a", "eval/loss": 3.0}', '{"step": null}', "[1]"])
def test_other_lines_of_a_log_are_ignored(tmp_path, line):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    (point, *_) = points(ladder, [1e-2] * 4)
    with open(tmp_path / "logs" / f"{point.id}.metrics.jsonl", "a") as file:
        file.write(line + "\n")
    assert read_results(ladder).law[0].state == "done"


def test_a_saved_config_that_cannot_be_read_is_a_difference(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    (point, *_) = points(ladder, [1e-2] * 4)
    (tmp_path / "logs" / point.id).mkdir()
    (tmp_path / "logs" / point.id / "config.yaml").write_text("model: [")
    (first, *_) = read_results(ladder).law
    assert first.state == "other settings"
    assert "config.yaml cannot be read" in first.differences[0]


def test_an_unfinished_line_of_a_killed_run_is_ignored(tmp_path):
    ladder = read_ladder(write_ladder(tmp_path), None)
    (point, *_) = points(ladder, [1e-2] * 4)
    write_log(tmp_path, point, 3.0)
    path = tmp_path / "logs" / f"{point.id}.metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    assert read_results(ladder).law[0].state == "at step 1"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": {"weight_decay": 0.2}}, "optimizer.weight_decay 0.2 instead of 0.1"),
        ({"trainer": {"early_stopping": {"patience": 2}}}, "trainer.early_stopping"),
        ({"trainer": {"max_eval_batches": 8}}, "trainer.max_eval_batches 8 instead of 4"),
        ({"trainer": {"num_train_steps": 9999}}, "trainer.num_train_steps 9999 instead of"),
        ({"data": {"validation_urls": ["other.jsonl"]}}, "data.validation_urls"),
        ({"z_loss_weight": 1e-4}, r"z_loss_weight 0\.0001 instead of"),
        ({"optimizer": {"lr_schedule": "linear"}}, "optimizer.lr_schedule linear instead of wsd"),
        ({"transfer": None}, "transfer.*instead of"),
    ],
)
def test_runs_with_other_settings_are_refused(tmp_path, changes, named):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    point = points(ladder, [1e-2] * 4)[4]
    config = ladder.load(point.settings, point.id).model_dump(mode="json")
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    folder = tmp_path / "logs" / point.id
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(config))
    results = read_results(ladder)
    assert [result.point.id for result in results.law if result.state == "other settings"] == [point.id]
    with pytest.raises(UserError, match=f"{point.id} was trained with other settings.*{named}"):
        fit_ladder(ladder, results, None)
    with pytest.raises(UserError, match=named):
        check(results)


def test_a_fit_names_other_settings_before_missing_runs(tmp_path):
    ladder = read_ladder(write_ladder(tmp_path, **RATES), None)
    trial, *_ = trials(ladder)
    write_log(tmp_path, trial, 3.0)
    (tmp_path / "logs" / trial.id).mkdir()
    (tmp_path / "logs" / trial.id / "config.yaml").write_text("model: [")
    with pytest.raises(UserError, match=f"{trial.id} was trained with other settings"):
        fit_ladder(ladder, read_results(ladder), None)


def test_the_settings_of_the_ladder_itself_are_no_difference(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    for point in points(ladder, [1e-2] * 4):
        folder = tmp_path / "logs" / point.id
        folder.mkdir()
        config = ladder.load(point.settings, point.id).model_dump(mode="json")
        (folder / "config.yaml").write_text(json.dumps(config))
    assert {result.state for result in read_results(ladder).law} == {"done"}


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (lambda point: point.size < 2, "2 sizes done, and the law's exponents need 3 or more"),
        (lambda point: point.ratio == 20, "1 ratio done, and the law's exponents need 2 or more"),
        (lambda point: point.ratio == 20 or point.id == "ladder-16x1-5x-lr0.01-seed0", "5 runs done, and the law"),
        (lambda point: point.size > 1 or (point.size == 0 and point.ratio == 5), None),
    ],
)
def test_runs_that_do_not_determine_the_exponents_are_refused(tmp_path, done, message):
    ladder = write_results(tmp_path, write_ladder(tmp_path), done=done)
    if message is None:
        assert fit_ladder(ladder, read_results(ladder), None).missing == 5
        return
    with pytest.raises(UserError, match=message):
        fit_ladder(ladder, read_results(ladder), None)


def test_seeds_are_no_points_of_the_law(tmp_path):
    """Of 8 runs there are 4 points, and the law has 5 unknowns."""
    path = write_ladder(tmp_path, schedule="cosine", seeds=[0, 1])
    done = {(0, 5), (1, 5), (2, 5), (2, 10)}
    ladder = write_results(tmp_path, path, done=lambda point: (point.size, point.ratio) in done)
    with pytest.raises(UserError, match="4 runs done, and the law's exponents need 6 or more"):
        fit_ladder(ladder, read_results(ladder), None)


def test_a_copy_of_a_run_is_refused(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path, schedule="cosine", seeds=[0, 1]))
    one, other = (point for point in points(ladder, [1e-2] * 4) if (point.size, point.ratio) == (2, 10))
    for point in (one, other):
        write_log(tmp_path, point, 3.25)
    with pytest.raises(UserError, match=f"{one.id} and {other.id} have the same loss of 3.25"):
        fit_ladder(ladder, read_results(ladder), None)


def test_a_fit_needs_the_learning_rates(tmp_path):
    ladder = read_ladder(write_ladder(tmp_path, **RATES), None)
    with pytest.raises(UserError, match=r"learning rates have not been tried, 3 runs left; run `lmtrain scaling run"):
        fit_ladder(ladder, read_results(ladder), None)


def test_repeated_data_is_refused(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    longest = max(point.tokens for point in points(ladder, [1e-2] * 4))
    with pytest.raises(UserError, match=r"2\.00 times the training data, and the law is for new data only"):
        fit_ladder(ladder, read_results(ladder), longest / 2)
    check_data(ladder, [longest], longest)
    check_data(ladder, [longest], None)


def test_the_backtest_predicts_the_largest_size(tmp_path):
    fitted = read_fit(write_results(tmp_path, write_ladder(tmp_path)))
    assert [tested.result.point.size for tested in fitted.backtest] == [3, 3, 3]
    for tested in fitted.backtest:
        point = tested.result.point
        assert tested.predicted == pytest.approx(LAW.loss(point.parameters, point.tokens), rel=0.02)
        assert tested.error == pytest.approx(tested.predicted / tested.result.loss - 1)


def test_with_three_sizes_the_backtest_leaves_out_one_run(tmp_path):
    fitted = read_fit(write_results(tmp_path, write_ladder(tmp_path), done=lambda point: point.size < 3))
    (tested,) = fitted.backtest
    assert (tested.result.point.size, tested.result.point.ratio) == (2, 20)


def test_the_speed_is_the_median_of_a_device(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    (point, *_) = points(ladder, [1e-2] * 4)
    assert read_speed(ladder.run.trainer.log_dir, point.id) == (25e9, 2, "cpu")
    with pytest.raises(UserError, match="nothing has no log with its speed"):
        read_speed(ladder.run.trainer.log_dir, "nothing")


def test_a_cosine_ladder_of_several_seeds_is_fitted_to_all_runs(tmp_path):
    path = write_ladder(tmp_path, schedule="cosine", seeds=[0, 1])
    fitted = read_fit(write_results(tmp_path, path))
    assert len(fitted.runs) == 24
    assert fitted.fit.degrees in (12, 12 - 5)
    assert fitted.fit.noise == pytest.approx(1e-3, rel=0.5)


def test_a_log_that_cannot_be_read_is_an_error(tmp_path):
    base = BASE | {"trainer": BASE["trainer"] | dirs(tmp_path)}
    ladder = read_ladder(write_ladder(tmp_path, base), None)
    (point, *_) = points(ladder, [1e-2] * 4)
    (tmp_path / "logs" / f"{point.id}.metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        read_results(ladder)


def test_arguments_of_a_run_are_in_no_command_line(tmp_path, monkeypatch):
    ladder = read_ladder(write_ladder(tmp_path, overrides={"trainer.tracker": WANDB}), None)
    started = []

    class Process:
        def __init__(self, command, **_):
            self.command, self.stdin = command, (tmp_path / "pipe").open("wb")
            started.append(self)

        def wait(self, _):
            return 2

    monkeypatch.setattr("subprocess.Popen", Process)
    with pytest.raises(UserError, match="was refused"):
        train_all(ladder, lambda: True)
    (process,) = started
    assert "key-of-wandb" not in " ".join(process.command)
    assert "key-of-wandb" in (tmp_path / "pipe").read_text()


def test_a_run_without_its_last_checkpoint_is_not_done(tmp_path):
    ladder = read_ladder(write_ladder(tmp_path), None)
    point, *_ = points(ladder, [1e-2] * 4)
    write_log(tmp_path, point, 3.0)
    path = tmp_path / "logs" / f"{point.id}.metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "blocking_seconds" not in line))
    results = read_results(ladder)
    assert (results.law[0].state, results.law[0].loss) == ("not saved", 3.0)
    assert point.id in {left.id for left in stages(results)[0]}
    folder = tmp_path / "checkpoints" / point.id / f"step-{point.steps}"
    folder.mkdir(parents=True)
    assert read_results(ladder).law[0].state == "not saved"
    (folder / "manifest.json").write_text("{}")
    assert read_results(ladder).law[0].state == "done"


def test_a_longer_run_of_the_same_id_is_another(tmp_path):
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    point, *_ = points(ladder, [1e-2] * 4)
    with open(tmp_path / "logs" / f"{point.id}.metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": point.steps + 5, "train/loss": 3.0}) + "\n")
    with pytest.raises(UserError, match=f"{point.steps + 5:,} steps instead of {point.steps:,}"):
        check(read_results(ladder))


def test_a_missing_checkpoint_of_a_branch_is_said_before_the_first_run(tmp_path, monkeypatch):
    """Also if other runs would be trained before it."""
    ladder = write_results(tmp_path, write_ladder(tmp_path), done=lambda point: point.size == 0 and point.ratio == 20)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(UserError, match=r"ladder-16x1-10x-lr0\.01-seed0 starts from"):
        train_all(ladder, lambda: True)


def test_the_best_rate_is_said_once_it_is_known(tmp_path, monkeypatch, capsys):
    ladder = write_results(tmp_path, write_ladder(tmp_path, **RATES), best=5e-3, done=lambda point: point.rate != 2e-2)

    class Process:
        """A trial that is trained, and then a run that is refused."""

        def __init__(self, *_, **__):
            self.stdin = (tmp_path / "pipe").open("wb")

        def wait(self, _):
            self.stdin.close()
            settings = json.loads((tmp_path / "pipe").read_text())
            (trial,) = [each for each in trials(ladder) if f"--trainer.id={each.id}" in settings] or [None]
            if trial is None:
                return 2
            assert "learning rate of" not in capsys.readouterr().err
            write_log(tmp_path, trial, 90.0)
            return 0

    monkeypatch.setattr("subprocess.Popen", Process)
    (tmp_path / "logs" / "ladder-32x2-20x-lr0.005-seed0.metrics.jsonl").unlink()
    with pytest.raises(UserError, match="was refused"):
        train_all(ladder, lambda: True)
    assert "learning rate of 16x1: 0.005" in (text := capsys.readouterr().err)
    assert "it is the lowest tried" in text
    assert text.index("lowest tried") < text.index("ladder-32x2-20x")
