"""A resolved config as YAML that loads again, each value with its origin."""

import pytest
import yaml

from lmtrain.config.layers import Layer, Origin
from lmtrain.config.load import load_config
from lmtrain.config.show import show
from lmtrain.run.config import RunConfig, resolved


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """`shown(text, *overrides, name=text)` -> (lines as {setting: comment}, data)."""
    monkeypatch.chdir(tmp_path)

    def write_and_show(text, *overrides, **others):
        for name, content in {"c": text, **others}.items():
            (tmp_path / f"{name}.yaml").write_text(content)
        loaded = load_config(RunConfig, "c.yaml", overrides)
        output = show(resolved(loaded.config), loaded.layer)
        assert yaml.safe_load(output) == resolved(loaded.config)
        return [line.strip() for line in output.splitlines()]

    return write_and_show


def comment(lines, setting):
    (found,) = [line for line in lines if line.removeprefix("- ").startswith(f"{setting}:")]
    return found.split("# ")[1]


def test_every_value_shows_its_file_and_line_its_flag_or_default(shown):
    lines = shown(
        "model: !include m.yaml\ntrainer:\n  seed: 3\n", ("model.num_heads", "2"), m="\nhidden_dim: 32\nnum_heads: 4\n"
    )
    assert comment(lines, "hidden_dim") == "m.yaml:2"
    assert comment(lines, "num_heads") == "--model.num_heads"
    assert comment(lines, "seed") == "c.yaml:3"
    assert comment(lines, "mlp_scale") == "default"


def test_values_in_a_list_of_sections_show_their_own_lines(shown):
    lines = shown("trainer:\n  tracker:\n    - type: json\n    - type: tensorboard\n      logdir: x\n")
    assert comment(lines, "logdir") == "c.yaml:5"
    assert "- type: json" in " ".join(lines)


def test_a_single_section_instead_of_a_list_keeps_its_lines(shown):
    lines = shown("trainer:\n  tracker:\n    type: tensorboard\n    logdir: x\n")
    assert comment(lines, "logdir") == "c.yaml:4"


def test_a_section_starts_with_its_type(shown):
    lines = shown("optimizer: {learning_rate: 1E-3}\n")
    assert lines[lines.index("optimizer:") + 1].startswith("type: adam")


@pytest.mark.parametrize("value", ["a: b", "#x", "null", "12", "ü", "- x", "'", '"', "{x", "trailing "])
def test_texts_that_yaml_would_parse_differently_are_quoted(shown, value):
    assert shown("", ("trainer.log_dir", yaml.safe_dump(value).strip()))


NOBODY = Layer()


def test_origins_are_aligned_after_the_longest_line():
    layer = Layer({"a": {"bcd": 1}}, {("a",): Origin("f.yaml", 1), ("a", "bcd"): Origin("f.yaml", 2)})
    assert show({"a": {"bcd": 1}, "e": None}, layer) == "a:\n  bcd: 1  # f.yaml:2\ne: null   # default\n"


def test_an_empty_config_shows_nothing():
    assert show({}, NOBODY) == ""


@pytest.mark.parametrize(
    "data",
    [
        {"a": []},
        {"a": {}},
        {"a": [[]]},
        {"a": [{}]},
        {"a": [{"b": 1}, {}]},
        {"a": [{"b": 1}, 2]},
        {"a": [{"b": {"c": {"d": 1}}}, {"b": [{"c": 1}, {"d": 2, "e": []}]}]},
        {"a": {"b": [{"c": [{"d": 1}, {"d": 2}]}]}, "e": 1},
        {"a": [[0, {"b": 1}], [5, {"b": 2}]]},
        {"a": 1e-5, "b": 1e22, "c": 0.1, "d": -0.0, "e": 10**30},
        {"a": "line\nline", "b": {"c": "line\n\n  line\n"}},
        {"a": "word " * 5000, "b": {"c": "x" * 20_000}},
        {"on": 1, "1": 2, "a: b": 3, "": 4, "null": 5},
        {"a": {"type": "x", "b": 1}, "type": "y"},
    ],
    ids=str,
)
def test_shown_data_loads_as_the_same_data(data):
    assert yaml.safe_load(show(data, NOBODY)) == data


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
        "data:\n  train_urls: [a, b]\n"
    )
    loaded = load_config(RunConfig, "run.yaml", [("optimizer.learning_rate", "1e-3"), ("trainer.id", "x")])
    output = show(resolved(loaded.config), loaded.layer)
    assert yaml.safe_load(output) == resolved(loaded.config)
    lines = {" ".join(line.split()) for line in output.splitlines()}
    assert lines >= {
        "- every: 5 # keep.yaml:1",
        "until: 10 # keep.yaml:2",
        "- every: 50 # keep.yaml:3",
        "until: null # default",
        "mlp: model # run.yaml:4",
        "train_urls: [a, b] # run.yaml:6",
        "learning_rate: 0.001 # --optimizer.learning_rate",
        "id: x # --trainer.id",
        "type: adam # default",
    }


def test_every_value_has_an_origin(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trainer:\n  tracker: [{type: json}, {project: p}]\n")
    loaded = load_config(RunConfig, str(path))
    for line in show(resolved(loaded.config), loaded.layer).splitlines():
        text, _, place = line.partition(" # ")
        assert text.rstrip().endswith(":") != bool(place), line
        assert place in ("", "default", f"{path}:2"), line
