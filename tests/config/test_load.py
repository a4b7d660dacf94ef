"""Loading a config: look-up, priorities, overrides, and one report of all problems."""

from pathlib import Path

import pytest

from lmtrain.config.load import (
    LoadedConfig,
    apply_overrides,
    find_config,
    load_config,
    shipped_configs,
    split_overrides,
)
from lmtrain.config.tree import ConfigTree, Origin
from lmtrain.run.config import RunConfig
from lmtrain.run.run import run_id
from lmtrain.runtime.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_overrides_win_over_the_file_and_the_file_over_defaults(folder):
    (folder / "c.yaml").write_text("model: {seq_len: 32, num_layers: 2}\n")
    model = load_config(RunConfig, "c.yaml", [("model.num_layers", "3")]).config.model
    assert (model.seq_len, model.num_layers, model.num_heads) == (32, 3, 12)


@pytest.mark.parametrize("written", ["dir/c.yaml", "./dir/c"])
def test_a_config_is_found_with_or_without_its_extension(folder, written):
    (folder / "dir").mkdir()
    (folder / "dir" / "c.yaml").write_text("")
    assert load_config(RunConfig, written).stem == "c"
    assert find_config(written).endswith("dir/c.yaml")


def test_a_file_in_the_working_directory_wins_over_a_shipped_config(folder):
    assert find_config("gpt2_nano") != "gpt2_nano.yaml"
    (folder / "gpt2_nano.yaml").write_text("")
    assert find_config("gpt2_nano") == "gpt2_nano.yaml"


@pytest.mark.parametrize(("config", "stem"), [("memory://d/run.v2.yaml", "run.v2"), ("memory://d/x", "x")])
def test_a_url_is_taken_as_given(config, stem):
    import fsspec

    with fsspec.open(config, "w") as file:
        file.write("trainer: {seed: 3}\n")
    loaded = load_config(RunConfig, config)
    assert (loaded.config.trainer.seed, loaded.stem, loaded.path) == (3, stem, config)
    assert LoadedConfig(RunConfig(), path=f"{config}?version=1&X-Amz-Signature=a%2Fb.c").stem == stem


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *((name, f"{name}: no such config; did you mean 'gpt2_nano'?") for name in ("gpt2_nan", "gpt2_nan.yaml")),
        *((name, f"{name}: no such config; ") for name in ("zzz", "", ".")),
    ],
)
def test_a_missing_config(folder, config, message):
    with pytest.raises(UserError) as caught:
        find_config(config)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("argv", "rest", "overrides"),
    [
        (["--a.b=", "c.yaml"], ["c.yaml"], [("a.b", "")]),
        (["--a.b=x=y"], [], [("a.b", "x=y")]),
        (["--a.b", "-5", "c.yaml"], ["c.yaml"], [("a.b", "-5")]),
        (["--a", "1", "--a", "2"], [], [("a", "1"), ("a", "2")]),
        (["c.yaml", "--output", "d", "--a", "1"], ["c.yaml", "--output", "d"], [("a", "1")]),
        (["c.yaml", "--output=d", "-h"], ["c.yaml", "--output=d", "-h"], []),
    ],
)
def test_overrides_are_separated_from_the_arguments_of_the_subcommand(argv, rest, overrides):
    assert split_overrides(argv, ["--output", "-h"]) == (rest, overrides)


@pytest.mark.parametrize("argv", [["--trainer.seed"], ["--trainer.seed", "--output", "x"], ["--trainer.seed", "--"]])
def test_an_override_without_a_value_is_an_error(argv):
    with pytest.raises(UserError, match=r"^--trainer\.seed "):
        split_overrides(argv, ["--output"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("{c: [1, 2.5]}", {"c": [1, 2.5]}), ("'100'", "100"), ("data/{1..8}.jsonl", "data/{1..8}.jsonl")],
)
def test_values_are_parsed_as_yaml(text, value):
    data = apply_overrides(ConfigTree(), [("a.b", text)]).data
    assert data == {"a": {"b": value}}
    assert type(data["a"]["b"]) is type(value)


@pytest.mark.parametrize(("name", "text"), [("a.b", ""), ("a.b", " "), ("a.b", "caf\udce9"), ("a.b\udce9", "1")])
def test_a_value_that_is_empty_or_not_utf8_is_an_error(name, text):
    with pytest.raises(UserError, match=r"^--a\.b"):
        apply_overrides(ConfigTree(), [(name, text)])


def test_a_later_override_wins_and_the_others_are_kept():
    layer = apply_overrides(ConfigTree(), [("a.b", "1"), ("a.c", "2"), ("a.b", "3"), ("d", "[1]"), ("d", "[2]")])
    assert layer.data == {"a": {"b": 3, "c": 2}, "d": [2]}
    assert (layer.origin_of(("a", "b")), layer.origin_of(("d", 0))) == (Origin("--a.b"), Origin("--d"))


def test_a_section_can_be_read_from_a_file_and_changed_by_a_later_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text("x: 1\ny: 2\n")
    layer = apply_overrides(ConfigTree(), [("model", "include m.yaml"), ("model.y", "3")])
    assert layer.data == {"model": {"x": 1, "y": 3}}
    assert str(layer.origin_of(("model", "x"))) == "m.yaml:1"
    assert str(layer.origin_of(("model", "y"))) == "--model.y"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("", "1", "--: "),
        ("a..b", "1", "--a..b: "),
        ("trainer.wandb,group", "g", "--trainer.wandb,group: no such setting; did you mean --trainer.wandb.group?"),
        ("a", "{", "--a: "),
        ("a", "!include x.yaml", '--a: write "include x.yaml"'),
        ("a", "include gone.yaml", "gone.yaml: "),
        ("a", "include ", "--a: "),
        ("a", "a\0b", "--a: "),
    ],
)
def test_an_invalid_override_names_its_flag(name, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        apply_overrides(ConfigTree(), [(name, text)])
    assert str(caught.value).startswith(message)


def test_an_include_is_found_among_the_shipped_configs_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer = apply_overrides(ConfigTree(), [("data", "include data/wikitext103.yaml")])
    assert layer.data["data"]["id"] == "Salesforce/wikitext"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext103.yaml").write_text("id: mine\n")
    assert apply_overrides(ConfigTree(), [("data", "include data/wikitext103.yaml")]).data == {"data": {"id": "mine"}}


def report(folder, text, overrides=()):
    """The lines of the report on a broken `c.yaml`."""
    (folder / "c.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(RunConfig, "c.yaml", overrides)
    return str(caught.value).splitlines()


# setting: value -> what the report says about it
BROKEN = [
    ("model.sql_len: 4", "no such setting; did you mean model.seq_len?"),
    ("model.learning_rate: 4", "no such setting; did you mean optimizer.learning_rate?"),
    ("data.format.input_field: x", "no such setting of the default type; set data.format.type"),
    ("lora.rnk: 4", "no such setting; did you mean lora.rank?"),
    ("model.seq_len: abc", "expected a whole number, not 'abc'"),
    ("model.seq_len: true", "expected a number, not true or false"),
    ("model.num_heads: 5", "5 does not divide hidden_dim 768; num_heads could be 4 or 6"),
    ("model.type: lama", "no such model 'lama'; did you mean 'llama'?"),
    ("optimizer.type: sgd", "no such optimizer 'sgd'; expected adam, sophia-h, sophia-g, lion, muon or adafactor"),
    ("optimizer.learning_rate: .nan", "expected "),
    ("optimizer.warmup: 1.5", "expected a fraction from 0.0 to 1.0, or a whole number of steps, not 1.5"),
    ("data.cache_dir: 2024-01-01", "expected text, not 2024-01-01"),
    ("data.cache_dir: ''", "is empty"),
    ("data.train_urls: a.jsonl", "expected a list, not 'a.jsonl'"),
    ("trainer.checkpointer.save_interval: 15", "a duration needs a unit, for example 15m; null turns it off, not 15"),
    ("trainer.per_device_parallelism: 5", "5 does not divide trainer.train_batch_size 32"),
    ("trainer.tracker.mode: offlin", "expected 'online', 'offline' or 'disabled', not 'offlin'"),
    ("trainer.num_train_steps: 1e30", "expected a whole number below 9e18, not 1e+30"),
    ("trainer.fsdp_axis: embd", "unknown logical axis 'embd'; did you mean 'embed'?"),
]

TRACKERS = "wandb, tensorboard, trackio, json, noop or package.module.Class"
# a file -> its line in the report
FILES_WITH_A_MISTAKE = [
    (
        "trainer:\n  tracker: tensorboard\n",
        f"2: trainer.tracker: expected a map with type: {TRACKERS}, not 'tensorboard'",
    ),
    ("trainer:\n  tracker:\n    - type: json\n    - projct: x\n", "4: trainer.tracker[1].projct: no such setting"),
    (
        "optimizer:\n  groups:\n    - {match: x, lr: 1}\n",
        "3: optimizer.groups[0].lr: no such setting; `lmtrain train --help opt",
    ),
    (
        "trainer:\n  checkpointer: {keep: [\n{until: 3}]}\n",
        "3: trainer.checkpointer.keep[0].every: this setting is required",
    ),
    (
        "data:\n  configs:\n    a:\n      format: {type: chat, input_field: x}\n",
        "4: data.configs.a.format.input_field: no such setting of type 'chat'",
    ),
    ("model:\n  type: llama\n  mlp_scale: 4\n", "3: model.mlp_scale: no such setting of type 'llama'"),
    ("optimizer:\n  lr_schedule: cosin\n", ", not 'cosin'; did you mean 'cosine'?"),
    ("data:\n  train_urls:\n    - a\n    - 3\n", "4: data.train_urls[1]: expected text, not 3"),
    ("optimizer:\n  warmup: 0.6\n  decay: 0.6\n", "3: optimizer.decay: 240,000 steps, with 240,000 of warmup, longer"),
    (
        "trainer:\n  initialize_from: a\ninitialize_from_hf: b\n",
        "3: initialize_from_hf: set together with trainer.initialize_from; remove one of them",
    ),
]


@pytest.mark.parametrize(("setting", "message"), BROKEN)
def test_an_invalid_setting_is_reported_with_its_line_its_name_and_advice(folder, setting, message):
    path, _, value = setting.partition(": ")
    parts = path.split(".")
    first, *lines = report(
        folder, "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(parts))[:-1] + f" {value}\n"
    )
    assert first.startswith("c.yaml: a problem in the config")
    assert [line for line in lines if line.startswith(f"  c.yaml:{len(parts)}: {path}: {message}")] == lines


@pytest.mark.parametrize(("text", "expected"), FILES_WITH_A_MISTAKE)
def test_a_mistake_in_a_list_or_between_settings_is_reported_with_its_line(folder, text, expected):
    _, *lines = report(folder, text)
    assert any(expected in line for line in lines), lines


def test_all_problems_are_reported_at_once_each_with_its_line(folder):
    assert report(folder, "model:\n  seq_len: x\n  num_heads: 0\ntrainer:\n  sed: 3\n") == [
        "c.yaml: 3 problems in the config",
        "  c.yaml:2: model.seq_len: expected a whole number, not 'x'",
        "  c.yaml:3: model.num_heads: expected greater than or equal to 1, not 0",
        "  c.yaml:5: trainer.sed: no such setting; did you mean trainer.seed?",
    ]


def test_a_problem_in_an_override_has_its_flag(folder):
    lines = report(folder, "model:\n  seq_len: 32\n", [("model.seq_len", "x"), ("trainer.sed", "1")])
    assert lines[1].startswith("  --model.seq_len: expected a whole number")
    assert lines[2] == "  --trainer.sed: no such setting; did you mean trainer.seed?"


def test_a_value_in_a_problem_has_no_secrets_also_if_it_is_truncated(folder):
    url = f"https://{'someone' * 5}:{'password' * 9}@host/a.jsonl"
    (line,) = report(folder, f"data:\n  train_urls: {url}\n")[1:]
    assert "password" not in line
    assert "***" in line
    assert len(line) < 200


CONFIGS = sorted(Path(shipped_configs()).glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_by_path_and_by_name_as_the_same_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_path, by_name = load_config(RunConfig, str(path)), load_config(RunConfig, path.stem)
    config = by_path.config
    assert config == by_name.config
    assert run_id(by_name.config, by_name.stem, {}).startswith(f"{path.stem}-")
