"""Checks at the start of a run, and the number of steps that the data allows."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmtrain.config.load import LoadedConfig
from lmtrain.config.tree import ConfigTree
from lmtrain.data.caches import Caches
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE, Processes
from lmtrain.train.start import checks as module
from lmtrain.train.start.checks import check_before_data, check_services, check_settings, length_of_data


def test_trackers_are_checked_by_the_first_process_only(caplog):
    custom = run_of(trainer={"tracker": {"type": "nowhere.at_all.Tracker"}})
    with pytest.raises(UserError, match="nowhere"):
        check_services(custom, ALONE)
    check_services(custom, Processes(1, 2))
    plain = run_of(trainer={"tracker": []}, lora=None)  # as all settings are set that a base resolves
    check_services(plain, ALONE)
    assert caplog.messages == []
    check_services(Run(replace(plain.loaded, tree=ConfigTree({"lora": None})), "one"), ALONE)
    (warning,) = caplog.messages
    assert warning.startswith("lora: is null, so all parameters are trained")


def run_of(**settings):
    return Run(LoadedConfig(RunConfig.model_validate(settings), path="one.yaml"), "one")


def test_an_adapter_to_start_from_is_checked_unless_the_run_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_of(initialize_from_hf="base", lora={"initialize_from": str(tmp_path)})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(UserError, match="peft_type 'IA3' is not supported"):
        check_settings(run)
    (tmp_path / "checkpoints/one/step-3").mkdir(parents=True)
    (tmp_path / "checkpoints/one/step-3/manifest.json").touch()
    check_settings(run)


@pytest.mark.parametrize("setting", ["trainer.initialize_from", "initialize_from_checkpoint_path"])
def test_a_checkpoint_to_start_from_is_looked_for_before_the_data(tmp_path, monkeypatch, setting):
    monkeypatch.chdir(tmp_path)
    model = {"type": "gpt2", "hidden_dim": 8, "num_heads": 1, "num_layers": 1, "seq_len": 8}
    section, _, name = setting.rpartition(".")
    more = {section: {name: "nowhere"}} if section else {name: "nowhere"}
    with pytest.raises(UserError, match=f"{setting}: checkpoint nowhere: no such folder"):
        check_before_data(run_of(model=model, data={"tokenizer": "byte"}, **more), "identity", ALONE)


CONFIG = RunConfig(epoch=2, trainer={"num_train_steps": 100, "train_batch_size": 4})


@pytest.mark.parametrize(
    ("steps", "config", "source"),
    [
        (100, CONFIG, None),
        (30, CONFIG, "epoch 2 (30 steps)"),
        (1, CONFIG.model_copy(update={"epoch": 0}), "data.stop_strategy first_exhausted (1 step)"),
    ],
)
def test_a_run_that_its_data_ends_has_that_number_of_steps(monkeypatch, caplog, steps, config, source):
    asked = []
    monkeypatch.setattr(module, "check_batch", lambda data, caches, *sizes: asked.append(sizes))
    monkeypatch.setattr(module, "choose_steps", lambda data, caches, *sizes: asked.append(sizes) or steps)
    with caplog.at_level("INFO"):
        found = length_of_data(config, Caches({}, {}))
    sizes = config.model.seq_len, config.trainer.batch_sizes
    assert asked == [sizes, (*sizes, 100, config.epoch, config.trainer.seed)]
    assert found == (source and (source, {"trainer": {"num_train_steps": steps}}))
    assert ("trainer.num_train_steps 100" if source is None else f"{steps} step") in caplog.text


def test_less_data_than_a_batch_is_refused(monkeypatch):
    monkeypatch.setattr(module, "check_batch", lambda *_: None)
    monkeypatch.setattr(module, "choose_steps", lambda *_: 0)
    with pytest.raises(UserError, match="the data is less than one batch; lower "):
        length_of_data(CONFIG, SimpleNamespace())
