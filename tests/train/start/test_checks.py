"""What is refused before data is read. `tests/end_to_end/test_mistakes.py` has the messages of the command."""

import json

import pytest

from lmtrain.config.load import LoadedConfig
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE, Processes
from lmtrain.train.start.checks import check_before_data, check_services, check_settings


def test_trackers_are_checked_by_the_first_process_only(caplog):
    custom = RunConfig.model_validate({"trainer": {"tracker": {"type": "nowhere.at_all.Tracker"}}})
    with pytest.raises(UserError, match="nowhere"):
        check_services(custom, ALONE)
    check_services(custom, Processes(1, 2))
    check_services(RunConfig.model_validate({"trainer": {"tracker": []}, "lora": None}), ALONE)
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
