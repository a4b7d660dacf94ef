"""Settings that another type or another text source replaces."""

import pytest
import yaml

from lmtrain.runtime.errors import UserError

DATA = {
    "demo": "data: {demo: d}\n",
    "urls": "data: {train_urls: [a], validation_urls: [b]}\n",
    "id": "data: {id: i, name: n, stream: true}\n",
    "configs": "data: {configs: {x: {id: y}}, train_weights: {x: 1.0}}\n",
}
FLAGS = {
    "demo": ("data.demo", "e"),
    "urls": ("data.train_urls", "[c]"),
    "id": ("data.id", "j"),
    "configs": ("data.configs", "{z: {validation_urls: [c]}}"),
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("kind", DATA)
def test_a_source_on_the_command_line_replaces_one_of_another_kind_with_a_notice(load, kind, flag):
    _, layer = load(DATA[kind], FLAGS[flag])
    (written,) = yaml.safe_load(DATA[kind]).values()
    name, value = FLAGS[flag]
    added = yaml.safe_load(value)
    merged = written["configs"] | added if kind == flag == "configs" else added
    assert layer.data["data"][name.removeprefix("data.")] == merged
    kept = {"urls": {"validation_urls"}, "configs": {"train_weights"}}.get(kind, set()) if kind == flag else set()
    for setting in set(written) - {name.removeprefix("data.")}:
        assert (setting in layer.data["data"]) == (setting in kept)
        assert (f"--{name}: replaces data.{setting} of main.yaml:1" in layer.notices) == (setting not in kept)


def test_a_file_replaces_the_source_of_its_include(load):
    config, tree = load("!include other.yaml\ndata: {id: i}\n", other="data: {demo: d, shuffle: true}\n")
    assert (config.data.id, config.data.demo, config.data.shuffle) == ("i", None, True)
    assert tree.notices == ["main.yaml:2: replaces data.demo of other.yaml:1"]


def test_two_kinds_of_sources_in_one_file_are_an_error(load):
    with pytest.raises(UserError, match=r"main.yaml:3: data.id: set together with train_urls"):
        load("data:\n  train_urls: [a]\n  id: i\n")


def test_another_type_on_the_command_line_drops_settings_that_it_does_not_have(load):
    text = (
        "trainer:\n  tracker:\n    project: p\noptimizer:\n  learning_rate: 2E-4\n  nesterov: true\n"
        "model:\n  num_layers: 3\n  mlp_scale: 2\n"
    )
    config, tree = load(
        text, ("trainer.tracker", "{type: json}"), ("optimizer.type", "sophia-h"), ("model.type", "llama")
    )
    assert [tracker.type for tracker in config.trainer.tracker] == ["json"]
    assert (config.optimizer.type, config.optimizer.learning_rate) == ("sophia-h", 2e-4)
    assert (config.model.type, config.model.num_layers) == ("llama", 3)
    assert tree.notices == [
        "--trainer.tracker: ignoring trainer.tracker.project (main.yaml:3): json has no such setting",
        "--optimizer.type: ignoring optimizer.nesterov (main.yaml:6): sophia-h has no such setting",
        "--model.type: ignoring model.mlp_scale (main.yaml:9): llama has no such setting",
    ]


def test_the_same_type_on_the_command_line_drops_nothing(load):
    with pytest.raises(UserError, match=r"main\.yaml:1: model\.num_layer: no such setting"):
        load("model: {num_layer: 2}\n", ("model.type", "gpt2"))
