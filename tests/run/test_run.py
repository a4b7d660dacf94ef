"""A run: its folders, and settings that come from the initial model or the data."""

import pytest

from lmtrain.config.describe import show
from lmtrain.config.load import LoadedConfig, load_config
from lmtrain.config.tree import Origin
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import ResolvedSettings, Run, resolve
from lmtrain.runtime.errors import UserError


@pytest.fixture
def run(settings, write_config):
    loaded = load_config(RunConfig, str(write_config(settings)))
    return Run(loaded, "a-run")


def test_the_folders_of_a_run(run):
    assert (run.logs, run.checkpoints) == ("logs/a-run", "checkpoints/a-run")


def test_nothing_found_changes_nothing(run):
    assert resolve(run, None) is run


def test_found_settings_override_the_config_and_have_their_source_as_origin(run):
    found = ResolvedSettings("epoch 1 (7 steps)", {"trainer": {"num_train_steps": 7}})
    after = resolve(run, found)
    assert after.config.trainer.num_train_steps == 7
    assert after.config.model_copy(update={"trainer": run.config.trainer}) == run.config
    shown = show(resolved(after.config), after.loaded.tree).splitlines()
    places = {line.split(":")[0].strip(): line.partition("# ")[2] for line in shown}
    assert places["num_train_steps"] == "epoch 1 (7 steps)"
    assert "tiny.yaml:" in places["train_batch_size"]
    assert places["seed"] == "default"
    assert (run.config.trainer.num_train_steps, run.loaded.tree.data["trainer"]["num_train_steps"]) == (12, 12)


def test_a_found_model_replaces_the_section_and_equal_settings_keep_their_origin(run):
    sizes = {"type": "llama", "num_layers": 3, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "seq_len": 32}
    after = resolve(run, ResolvedSettings("base/config.json", {"model": sizes, "data": {"tokenizer": "byte"}}))
    assert (after.config.model.type, after.config.model.num_layers) == ("llama", 3)
    layer = after.loaded.tree
    assert (
        layer.origin_of(("model", "num_layers")) == layer.origin_of(("data", "tokenizer")) == Origin("base/config.json")
    )
    assert layer.origin_of(("model", "seq_len")).source.endswith("tiny.yaml")  # written, with the same value


def test_an_invalid_result_is_an_error_with_the_source_and_the_setting(run):
    with pytest.raises(
        UserError, match=r"^base: its config\.json gives model\.num_heads: 5 does not divide hidden_dim"
    ):
        resolve(run, ResolvedSettings("base: its config.json", {"model": {"type": "gpt2", "num_heads": 5}}))
    with pytest.raises(UserError, match=r"^epoch 1 gives trainer\.num_train_steps: "):
        resolve(run, ResolvedSettings("epoch 1", {"trainer": {"num_train_steps": 0}}))


def test_a_config_made_in_python_is_resolved_too():
    run = Run(LoadedConfig(RunConfig(model={"seq_len": 64}), path="python"), "python-123456")
    after = resolve(run, ResolvedSettings("epoch 1", {"trainer": {"num_train_steps": 5}}))
    assert (after.config.trainer.num_train_steps, after.config.model.seq_len) == (5, 64)
    assert after.loaded.tree.origin_of(("trainer", "num_train_steps")) == Origin("epoch 1")
