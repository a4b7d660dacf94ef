"""Descriptions of all settings, and a resolved config as YAML with origins."""

from datetime import timedelta

import pytest
import yaml

from lmtrain.config.describe import describe, sections_of, show, written
from lmtrain.config.load import load_config
from lmtrain.config.tree import ConfigTree, Origin
from lmtrain.run.config import RunConfig, resolved
from lmtrain.tracking.config import JsonConfig

GROUPS = describe(RunConfig)
SETTINGS = [setting for group in GROUPS for setting in group.settings]


def leaves(model, at=""):
    """Dotted names of all settings that are not sections."""
    for name, field in model.model_fields.items():
        below = sections_of(field.annotation)
        yield from (leaf for section in below for leaf in leaves(section, f"{at}{name}."))
        if not below:
            yield f"{at}{name}"


def test_every_setting_is_described():
    described = {setting.name.replace("[]", "").replace(".<name>", "") for setting in SETTINGS}
    types = {name for name in leaves(RunConfig) if name.endswith(".type")} - {"model.rope.type"}  # in titles
    assert set(leaves(RunConfig)) - types - described == set()
    assert {"lora", "data.configs", "trainer.tracker", "trainer.tracker.type"} <= described


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "true"),
        (1e-5, "1.0e-05"),
        ("12", "'12'"),
        (timedelta(minutes=90), "1h30m"),
        ([JsonConfig()], "[{type: json}]"),
        ("null", "'null'"),
        ("word " * 100 + "end", "word " * 100 + "end"),
    ],
)
def test_defaults_are_written_as_yaml(value, expected):
    assert written(value) == expected


NOBODY = ConfigTree()


@pytest.mark.parametrize(
    "data",
    [
        {"a": [{"b": 1}, 2]},
        {"a": [{"b": {"c": {"d": 1}}}, {"b": [{"c": 1}, {"d": 2, "e": []}]}]},
        {"a": [[0, {"b": 1}], [5, {"b": 2}]]},
        {"a": 1e-5, "b": 1e22, "c": 0.1, "d": -0.0, "e": 10**30},
        {"a": "word " * 5000, "b": {"c": "x" * 20_000}},
        {"on": 1, "1": 2, "a: b": 3, "": 4, "null": 5},
        {"a": ["a: b", "#x", "null", "12", "ü", "- x", "'", '"', "{x", "trailing "]},
    ],
    ids=str,
)
def test_shown_data_loads_as_the_same_data(data):
    assert (yaml.safe_load(show(data, NOBODY)) or {}) == data


def test_the_type_comes_first_at_any_depth_and_the_order_is_kept():
    data = {"b": 1, "a": {"z": 1, "type": "t", "y": 2}, "l": [{"n": 1, "type": "u", "m": {"k": 1, "type": "v"}}]}
    shown = show(data, NOBODY)
    assert [line.split("#")[0].rstrip() for line in shown.splitlines()] == [
        *("b: 1", "a:", "  type: t", "  z: 1", "  y: 2"),
        *("l:", "- type: u", "  n: 1", "  m:", "    type: v", "    k: 1"),
    ]


def test_origins_with_an_include_a_flag_and_a_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep.yaml").write_text("- every: 5\n  until: 10\n- every: 50\n")
    (tmp_path / "run.yaml").write_text(
        "trainer:\n  checkpointer:\n    keep: !include keep.yaml\n  axis_resources: {mlp: model}\n"
        "  tracker:\n    type: tensorboard\n    logdir: x\ndata:\n  train_urls: [a, b]\n"
    )
    loaded = load_config(RunConfig, "run.yaml", [("optimizer.learning_rate", "1e-3"), ("trainer.id", "x")])
    output = show(resolved(loaded.config), loaded.tree)
    assert yaml.safe_load(output) == resolved(loaded.config)
    for line in output.splitlines():
        assert line.partition(" # ")[0].rstrip().endswith(":") != (" # " in line), line
    lines = {" ".join(line.split()) for line in output.splitlines()}
    assert lines >= {
        "- every: 5 # keep.yaml:1",
        "until: 10 # keep.yaml:2",
        "- every: 50 # keep.yaml:3",
        "until: null # default",
        "mlp: model # run.yaml:4",
        "logdir: x # run.yaml:7",
        "train_urls: [a, b] # run.yaml:9",
        "learning_rate: 0.001 # --optimizer.learning_rate",
        "id: x # --trainer.id",
        "type: adam # default",
    }


def test_the_origin_of_a_value_has_no_secrets():
    layer = ConfigTree({"a": 1}, {("a",): Origin("https://me:word@host/a.yaml?sig=b", 3)})
    assert show({"a": 1}, layer) == "a: 1  # https://***@host/a.yaml?***:3\n"
