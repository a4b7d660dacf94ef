"""A resolved config is shown as YAML that loads again, each value with its place."""

import pytest
import yaml

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


def test_every_value_has_its_file_and_line_its_flag_or_default(shown):
    lines = shown(
        "model: !include m.yaml\ntrainer:\n  seed: 3\n", ("model.num_heads", "2"), m="\nhidden_dim: 32\nnum_heads: 4\n"
    )
    assert comment(lines, "hidden_dim") == "m.yaml:2"
    assert comment(lines, "num_heads") == "--model.num_heads"
    assert comment(lines, "seed") == "c.yaml:3"
    assert comment(lines, "mlp_scale") == "default"


def test_values_in_a_list_of_sections_have_places_of_their_own(shown):
    lines = shown("trainer:\n  tracker:\n    - type: json\n    - type: tensorboard\n      logdir: x\n")
    assert comment(lines, "logdir") == "c.yaml:5"
    assert "- type: json" in " ".join(lines)


def test_a_section_written_alone_where_a_list_may_stand_keeps_its_places(shown):
    lines = shown("trainer:\n  tracker:\n    type: tensorboard\n    logdir: x\n")
    assert comment(lines, "logdir") == "c.yaml:4"


def test_a_section_begins_with_its_type(shown):
    lines = shown("optimizer: {learning_rate: 1E-3}\n")
    assert lines[lines.index("optimizer:") + 1].startswith("type: adam")


@pytest.mark.parametrize("value", ["a: b", "#x", "null", "12", "ü", "- x", "'", '"', "{x", "trailing "])
def test_texts_that_yaml_would_read_otherwise_are_quoted(shown, value):
    assert shown("", ("trainer.log_dir", yaml.safe_dump(value).strip()))
