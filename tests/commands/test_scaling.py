"""`lmtrain scaling run|status|fit|predict LADDER` and `lmtrain report --scaling`, on a ladder whose runs are logs."""

import json
import shlex

import pytest
import yaml
from report.made import Page
from scaling.made_ladder import BASE, LADDER, LAW, dirs, write_ladder, write_log, write_results

from lmtrain.commands.scaling import read_ladder
from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig
from lmtrain.scaling.ladder import multiplying_parameters
from lmtrain.scaling.points import points
from lmtrain.scaling.predict import tokens_of

BIG = {"type": "llama", "hidden_dim": 128, "intermediate_dim": 352, "num_heads": 8, "num_layers": 8, "seq_len": 32}
RATES = {"learning_rates": [5e-3, 1e-2, 2e-2]}


@pytest.fixture
def done(tmp_path):
    """A ladder all of whose runs are done, and big.yaml."""
    ladder = write_results(tmp_path, write_ladder(tmp_path))
    write_big(tmp_path)
    return ladder


def write_big(folder, changes=None, **optimizer):
    settings = {"lr_schedule": "wsd", **BASE["optimizer"], **optimizer}
    trainer = BASE["trainer"] | dirs(folder) | {"num_train_steps": 50_000}
    base = LADDER["sizes"][0]
    big = {"data": BASE["data"], "model": BIG, "trainer": trainer, "optimizer": settings, "transfer": {"base": base}}
    big |= changes or {}
    (folder / "big.yaml").write_text(yaml.safe_dump(big))


def test_the_status_is_a_table(tmp_path, run_cli):
    write_results(tmp_path, write_ladder(tmp_path, **RATES), done=lambda point: point.size < 2)
    ladder = read_ladder(str(tmp_path / "ladder.yaml"), None)
    (half, *_) = [point for point in points(ladder, [1e-2] * 4) if point.size == 2]
    write_log(tmp_path, half, 3.0, steps=half.steps - 5)
    lines = run_cli("scaling", "status", "ladder.yaml", code=0).stdout.splitlines()
    assert lines[0].split() == ["run", "N", "D", "D", "/", "N", "rate", "seed", "state", "loss"]
    rows = {line.split()[0]: line for line in lines[2:] if line.startswith("ladder-")}
    assert len(rows) == 14
    assert f"at step {half.steps - 5:,}" in rows[half.id]
    assert sum(" done " in row for row in rows.values()) == 8
    (rate,) = [line for line in lines if line.startswith("learning rate of 16x1: 0.01 (0.005: ")]
    assert rate.count(":") == 4
    assert lines[-1].startswith("left: 6 runs, ")
    objects = json.loads(run_cli("scaling", "status", "ladder.yaml", "--json", code=0).stdout)
    assert [(each["id"], each["state"]) for each in objects if each["id"] == half.id] == [
        (half.id, f"at step {half.steps - 5:,}")
    ]


def test_the_fit_is_the_law(done, run_cli):
    text = run_cli("scaling", "fit", "ladder.yaml", code=0).stdout
    assert "ladder: 12 runs of 4 sizes" in text
    assert "backtest  a fit without 3 runs of 64x4 predicts them" in text
    found = json.loads(run_cli("scaling", "fit", "ladder.yaml", "--json", code=0).stdout)
    assert found["runs"] == len(found["residuals"]) == 12
    assert set(found["law"]) == {"E", "A", "alpha", "B", "beta"}
    for name, value in found["law"].items():
        low, high = found["intervals"][name]
        assert low <= value <= high
    for name in found["unidentified"]:
        assert f"{found['law'][name]:.4g}" in text
    assert ("NOT IDENTIFIED" in text) == bool(found["unidentified"])


def test_a_prediction_has_a_loss_and_a_cost(done, tmp_path, run_cli):
    answer = json.loads(run_cli("scaling", "predict", "ladder.yaml", "--config", "big.yaml", "--json", code=0).stdout)
    config = load_config(RunConfig, str(tmp_path / "big.yaml")).config
    parameters = multiplying_parameters(config.model, done.vocab_size)
    assert (answer["parameters"], answer["tokens"]) == (parameters, 50_000 * 4 * 32)
    assert answer["loss"] == pytest.approx(LAW.loss(parameters, 50_000 * 4 * 32), rel=0.02)
    low, high = answer["interval"]
    assert low < LAW.loss(parameters, 50_000 * 4 * 32) < high
    # the speed of the largest run, 25 GFLOP/s on each of two devices
    assert answer["device_hours"] == pytest.approx(answer["flops"] / 25e9 / 3600)
    text = run_cli("scaling", "predict", "ladder.yaml", "--config", "big.yaml", code=0).stdout
    assert f"beyond    the ladder's largest run by {answer['size_factor']:.3g} x in N" in text
    assert "2 x cpu: 2.5e+10 FLOP/s each, measured in ladder-64x4-20x-lr0.01-seed0" in text
    assert "does not know" not in text


@pytest.mark.parametrize(
    ("changes", "optimizer", "expected"),
    [
        ({}, {"weight_decay": 0.2}, "optimizer.weight_decay 0.2 (ladder: 0.1)"),
        ({}, {"learning_rate": 1.0}, "optimizer.learning_rate 1.0 (ladder: 0.01)"),
        ({}, {"decay": 0.9}, "optimizer.decay 0.9 (ladder: 0.2)"),
        ({"model": BIG | {"initializer_range": 0.001}}, {}, "model.initializer_range 0.001 (ladder: unset)"),
        ({"transfer": None}, {}, "transfer unset (ladder: {'base': {'hidden_dim': 16,"),
    ],
)
def test_what_the_law_does_not_know_is_said(done, tmp_path, run_cli, changes, optimizer, expected):
    write_big(tmp_path, changes, **optimizer)
    command = ("scaling", "predict", "ladder.yaml", "--config", "big.yaml")
    (effect,) = json.loads(run_cli(*command, "--json", code=0).stdout)["unknown_effects"]
    assert effect.startswith(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": BIG | {"type": "gpt2"}}, "model.type is gpt2"),
        ({"data": BASE["data"] | {"tokenizer": "byte"}}, "data.tokenizer is byte"),
        ({"initialize_from_hf": "gpt2"}, "config sets initialize_from_hf: a ladder and its law"),
    ],
)
def test_configs_of_another_scale_are_refused(done, tmp_path, run_cli, changes, message):
    write_big(tmp_path, changes)
    settings = yaml.safe_load((tmp_path / "big.yaml").read_text())
    if settings["model"]["type"] == "gpt2":
        del settings["model"]["intermediate_dim"], settings["transfer"]
        (tmp_path / "big.yaml").write_text(yaml.safe_dump(settings))
    ended = run_cli("scaling", "predict", "ladder.yaml", "--config", "big.yaml", code=2)
    assert message in ended.stderr


def test_only_files_of_the_command_are_overwritten(done, tmp_path, run_cli):
    before = (tmp_path / "big.yaml").read_text()
    command = ("scaling", "predict", "ladder.yaml", "--hours", 1, "--device", "h100", "--mfu", 1e-4, "--write")
    for name in ("big.yaml", "ladder.yaml"):
        assert "this file exists; choose another name" in run_cli(*command, name, code=2).stderr
    assert (tmp_path / "big.yaml").read_text() == before
    for _ in range(2):
        run_cli(*command, "best.yaml", code=0)


@pytest.mark.parametrize(
    ("flags", "batch", "message"),
    [
        (("--hours", 10, "--device", "h100", "--mfu", 0.4), 4, "times the largest N of the ladder, and 100 times are"),
        (("--hours", 1e-6), 4, "less than the smallest N of the ladder"),
        (("--hours", 1e-4, "--device", "h100", "--mfu", 0.4), 16_384, "and 100 are the fewest"),
    ],
)
def test_budgets_outside_the_ladder_are_refused(done, tmp_path, run_cli, flags, batch, message):
    write_big(tmp_path, {"trainer": BASE["trainer"] | dirs(tmp_path) | {"train_batch_size": batch}})
    ended = run_cli("scaling", "predict", "ladder.yaml", "--config", "big.yaml", *flags, "--write", "best.yaml", code=2)
    assert message in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "best.yaml").exists()


def test_a_law_that_is_not_identified_has_no_best_size(tmp_path, run_cli):
    """Noise of 5 %: the exponents may be anything. The best N is not, and a run is far outside by its tokens alone."""
    write_results(tmp_path, write_ladder(tmp_path), noise=0.05)
    write_big(tmp_path, {"trainer": BASE["trainer"] | dirs(tmp_path) | {"num_train_steps": 5_000_000}})
    command = ("scaling", "predict", "ladder.yaml", "--config", "big.yaml", "--device", "h100", "--mfu", 0.4)
    ended = run_cli(*command, "--hours", 1e-5, code=2)
    assert "best size" in ended.stderr
    text = run_cli(*command, code=0).stdout
    assert "NOT IDENTIFIED" in text
    assert "3 NOT INFORMATIVE, with intervals wider than 10 %" in text
    assert "0 of 3 in the interval" in text
    assert "far outside the ladder" in text


def test_the_best_run_is_a_config(done, tmp_path, run_cli):
    flags = ("--device", "h100", "--devices", 8, "--mfu", 0.4, "--hours", 0.001)
    command = ("scaling", "predict", "ladder.yaml", *flags, "--write", "best.yaml", "--json")
    answer = json.loads(run_cli(*command, code=0).stdout)["best"]
    assert answer["flops"] == pytest.approx(8 * 0.4 * 989.4e12 * 3.6, rel=0.05)
    low, high = answer["range"]
    assert low < answer["parameters"] < high
    least, most = answer["size_interval"]
    assert 1.1 < most / least < 2
    assert answer["loss"] == pytest.approx(LAW.loss(answer["parameters"], answer["tokens"]), rel=0.02)
    run_cli("config", "check", "best.yaml", code=0)
    config = load_config(RunConfig, str(tmp_path / "best.yaml")).config
    assert multiplying_parameters(config.model, done.vocab_size) == answer["parameters"]
    assert tokens_of(config) == answer["tokens"]
    assert config.optimizer.lr_schedule == "wsd"
    assert config.transfer.base == done.base_sizes
    assert config.model.hidden_dim / config.model.num_heads == 16  # the ladder's config


def test_without_transfer_the_best_run_has_none(tmp_path, run_cli):
    write_results(tmp_path, write_ladder(tmp_path, transfer=False))
    write_big(tmp_path)
    command = ("scaling", "predict", "ladder.yaml", "--config", "big.yaml", "--hours", 1, "--write", "best.yaml")
    assert "transfer.base.hidden_dim 16 (ladder: unset)" in run_cli(*command, code=0).stdout
    assert load_config(RunConfig, str(tmp_path / "best.yaml")).config.transfer is None


def test_commands_are_those_of_the_ladder(tmp_path, run_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_results(tmp_path, write_ladder(tmp_path, **RATES), done=lambda point: point.size == 0)
    lines = run_cli("scaling", "run", "ladder.yaml", "--commands", code=0).stdout.splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith("#")] == [0, 4]
    ladder = read_ladder(str(tmp_path / "ladder.yaml"), None)
    expected = {point.id: point for point in points(ladder, [1e-2] * 4) if point.size}
    for line in lines:
        if line.startswith("#"):
            continue
        program, verb, config, *flags = shlex.split(line)
        assert (program, verb) == ("lmtrain", "train")
        overrides = [tuple(flag.removeprefix("--").split("=", 1)) for flag in flags]
        loaded = load_config(RunConfig, config, overrides).config
        point = expected.pop(loaded.trainer.id)
        assert loaded == ladder.load(point.settings, point.id)
    assert not expected


SECRETS = {
    "data.train_urls": ["https://me:pass-word-1@host/a.jsonl", "https://host/b.jsonl?v=1&X-Amz-Signature=signature-2"],
    "trainer.tracker": {"type": "wandb", "settings": {"api_key": "key-of-wandb-3"}, "config": {"hub_token": "token-4"}},
}


def test_commands_have_no_secrets(tmp_path, run_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_ladder(tmp_path, overrides=SECRETS)
    ended = run_cli("scaling", "run", path, "--slurm", "jobs", code=0)
    files = [file.read_text() for file in (tmp_path / "jobs").glob("*")]
    text = "\n".join([ended.stdout, ended.stderr, *files])
    for secret in ("pass-word-1", "signature-2", "key-of-wandb-3", "token-4"):
        assert secret not in text
    ladder = read_ladder(path, None)
    trained = []
    monkeypatch.setattr("lmtrain.commands.train.run", lambda argv: trained.append(argv) or 75)
    commands = [line for line in text.splitlines() if "--only" in line]
    assert len(commands) == 12
    for line, point in zip(commands[:4], [p for p in points(ladder, [1e-2] * 4) if not p.parent], strict=True):
        run_cli(*shlex.split(line.removeprefix("lmtrain ")), code=75)
        config, *others = trained.pop()
        overrides = [tuple(flag.removeprefix("--").split("=", 1)) for flag in others]
        assert load_config(RunConfig, config, overrides).config == ladder.load(point.settings, point.id)


def test_secrets_of_folders_are_in_no_command(tmp_path, run_cli):
    """The URL from which a branch starts is that of the config's checkpoints."""
    trainer = BASE["trainer"] | dirs(tmp_path) | {"checkpointer": {"base_path": "s3://me:word@bucket/"}}
    path = write_ladder(tmp_path, BASE | {"trainer": trainer})
    lines = run_cli("scaling", "run", path, "--commands", code=0).stdout.splitlines()
    assert "word" not in "\n".join(lines)
    assert [sum(part in line for line in lines) for part in ("--trainer.id", "--only")] == [4, 8]


def test_one_run_of_a_ladder_is_one_that_it_has(tmp_path, run_cli):
    path = write_ladder(tmp_path)
    ended = run_cli("scaling", "run", path, "--only", "ladder-16x1-20x-lr0.1-seed0", code=2)
    assert "did you mean ladder-16x1-20x-lr0.01-seed0" in ended.stderr
    ended = run_cli("scaling", "run", path, "--only", "ladder-16x1-10x-lr0.01-seed0", code=2)
    assert "step-" in ended.stderr
    assert "which is no complete checkpoint" in ended.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("run", "--commands", "--slurm", "jobs"), "--commands and --slurm"),
        (("fit", "--hours", 1), "--hours: "),
        (("predict",), "--config"),
        (("predict", "--hours", 1, "--efficiency", 0.5), "--efficiency: "),
        (("predict", "--config", "big.yaml", "--write", "best.yaml"), "--write: "),
        (("predict", "--hours", 1, "--mfu", 2), "--mfu"),
        (("predict", "--hours", 1, "--device", "h1000"), "h1000"),
        (("predict", "--hours", 1, "--run", "none"), "none "),
        (("predict", "--config", "nothing.yaml"), "nothing.yaml"),
        (("predict", "--hours", 0.01, "--write", "no/best.yaml"), "--write no/best.yaml: "),
    ],
)
def test_bad_arguments_are_errors(done, run_cli, flags, message):
    action, *others = flags
    ended = run_cli("scaling", action, "ladder.yaml", *others)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stdout == ""


def test_a_complete_ladder_runs_nothing_and_its_report_has_plots_and_predictions(done, tmp_path, run_cli):
    assert run_cli("scaling", "run", "ladder.yaml", "--slurm", "jobs", code=0).stdout == ""
    assert not (tmp_path / "jobs").exists()
    assert run_cli("scaling", "run", "ladder.yaml", code=0).stderr == ""
    assert "sizes" in run_cli("scaling", "status", "big.yaml", code=2).stderr  # the config of a run
    command = ("report", "--scaling", "ladder.yaml", "--predict", "big.yaml")
    out = run_cli(*command, code=0).stdout
    page = (tmp_path / "ladder-report.html").read_text()
    assert Page(page).problems == []
    plots = sorted(path.name for path in (tmp_path / "ladder-report-plots").iterdir())
    assert f"{len(plots)} plots in ladder-report-plots" in out
    for part in ("big.yaml", "backtest", "ladder-64x4-20x-lr0.01-seed0"):
        assert part in page, part
    assert len(plots) == 3


def test_a_report_of_an_unfinished_ladder_says_what_is_missing(tmp_path, run_cli):
    write_results(tmp_path, write_ladder(tmp_path, **RATES), done=lambda point: point.size == 0)
    out = run_cli("report", "--scaling", "ladder.yaml", "--output", "now.html", code=0).stdout
    assert "1 size done, and the law's exponents need 3 or more" in out
    page = (tmp_path / "now.html").read_text()
    assert "1 size done" in page
    assert "left: 9 runs" in page
    ended = run_cli("report", "--scaling", "ladder.yaml", "--predict", "base.yaml", code=2)
    assert "1 size done" in ended.stderr
