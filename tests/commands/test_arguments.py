"""Shared parsing of command lines: CONFIG, own flags and overrides in any order, errors as UserError."""

import pytest

from lmtrain.commands.arguments import Parser, add_model_flags, parse_run
from lmtrain.runtime.errors import UserError


@pytest.fixture
def parse(settings, write_config, tmp_path, monkeypatch):
    """Parse a command line of a command with one own flag, in a folder with a tiny config."""
    monkeypatch.chdir(tmp_path)
    write_config(settings)

    def run(*argv):
        parser = Parser("verb", "Does a thing.")
        parser.add_argument("--count", type=int, default=1)
        return parse_run(parser, list(argv))[1]

    return run


@pytest.mark.parametrize(
    "argv",
    [
        ["tiny.yaml", "--count", "3", "--trainer.seed", "7"],
        ["--trainer.seed", "7", "--count", "3", "tiny.yaml"],
        ["--count=3", "--trainer.seed=7", "tiny"],
        ["--trainer.seed", "1", "tiny.yaml", "--trainer.seed", "7", "--count", "3"],
    ],
)
@pytest.mark.usefixtures("parse")
def test_config_flags_and_overrides_come_in_any_order(argv):
    parser = Parser("verb", "Does a thing.")
    parser.add_argument("--count", type=int, default=1)
    arguments, run = parse_run(parser, list(argv))
    assert (arguments.count, run.config.trainer.seed, run.config.model.hidden_dim) == (3, 7, 32)
    assert run.config is run.loaded.config


def test_the_id_of_the_run_is_made_from_the_name_of_the_config(parse, monkeypatch):
    assert parse("tiny.yaml").id.startswith("tiny-")
    monkeypatch.setenv("RUN_ID", "from-env")
    assert parse("tiny.yaml").id == "from-env"
    assert parse("tiny.yaml", "--trainer.id", "mine").id == "mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "CONFIG"),
        (["tiny.yaml", "--cuont", "1"], "did you mean --count"),
        (["tiny.yaml", "extra"], ": extra"),
        (["tiny.yaml", "--config_path", "b"], "got tiny.yaml and b"),
        (["tiny.yaml", "--count", "many"], "argument --count: "),
        (["tiny.yaml", "--trainer.seed"], "--trainer.seed "),
        (["--resume", "tiny.yaml"], "--resume: "),
        (["tiny.yaml", "--trainer.id", "../x"], "run id '../x'"),
    ],
)
def test_a_wrong_command_line_is_a_user_error(parse, argv, message):
    with pytest.raises(UserError) as caught:
        parse(*argv)
    assert message in str(caught.value)


def test_a_flag_may_name_the_config_and_flags_of_the_references_programs_are_settings(parse):
    run = parse("--config_path", "tiny.yaml", "--address", "auto", "--start_workers", "false")
    assert (run.config.trainer.ray.address, run.config.trainer.ray.start_workers) == ("auto", False)


def test_notices_of_the_config_are_printed_first(parse, capsys):
    run = parse("tiny.yaml", "--trainer.batch_size", "2")
    assert capsys.readouterr().err.splitlines() == [f"note: {notice}" for notice in run.loaded.tree.notices]
    assert len(run.loaded.tree.notices) == 1


def test_an_unknown_run_is_an_error_with_the_runs_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "config.yaml").touch()
    parser = Parser("verb", "Does a thing.")
    add_model_flags(parser)
    with pytest.raises(UserError, match=r"^--run six: logs/six/config.yaml .*: one, two$"):
        parse_run(parser, ["--run", "six"])


@pytest.mark.parametrize(
    "argv",
    [["--output", ""], ["--output", "${OUT}/a"], ["--output=caf\udce9"], ["--run", ""], ["tiny.yaml", "--config", " "]],
)
@pytest.mark.usefixtures("parse")
def test_a_path_that_cannot_be_meant_is_a_user_error(argv):
    parser = Parser("verb", "Does a thing.")
    for flag in ("--output", "--run"):
        parser.add_argument(flag, metavar="DIR")
    with pytest.raises(UserError, match=r"^--(output|run|config_path/--config): "):
        parse_run(parser, argv)
