"""Every setting of the reference's tables exists, with its name and its default."""

import pytest

from lmtrain.config.describe import describe
from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig

DEFAULTS = {
    "trainer": {
        "seed": 0,
        "num_train_steps": 400_000,
        "train_batch_size": 32,
        "per_device_parallelism": -1,
        "per_device_eval_parallelism": -1,
        "steps_per_eval": 1000,
        "max_eval_batches": None,
        "mp": "f32",
        "log_dir": "logs/",
        "batch_axis": "batch",
        "fsdp_axis": "embed",
        "tensor_parallel_axes": None,
        "model_axis_size": 1,
        "axis_resources": {},
        "parameter_axis_resources": {},
        "compute_axis_resources": {},
        "load_checkpoint": None,
        "load_checkpoint_path": None,
        "initialize_from": None,
    },
    "trainer.checkpointer": {"base_path": "checkpoints/", "save_interval": "15m"},
    "trainer.tracker.0": {
        "type": "wandb",
        "entity": None,
        "project": None,
        "tags": [],
        "id": None,
        "name": None,
        "group": None,
        "save_code": True,
        "save_xla_dumps": False,
    },
    "trainer.ray": {"address": None, "start_workers": True, "auto_start_cluster": True},
    "trainer.distributed": {
        "coordinator_address": None,
        "num_processes": None,
        "process_id": None,
        "local_device_ids": None,
    },
    "optimizer": {
        "type": "adam",
        "weight_decay": 0.0,
        "learning_rate": 1e-4,
        "lr_schedule": "cosine",
        "min_lr_ratio": 0.1,
        "warmup": 0.01,
        "decay": None,
        "rewarmup": 0.0,
        "cycles": None,
        "cycle_length": None,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "max_grad_norm": 1.0,
    },
    "data": {
        "train_urls": None,
        "validation_urls": None,
        "id": None,
        "name": None,
        "stream": False,
        "tokenizer": "gpt2",
        "cache_dir": "cache/",
        "text_key": "text",
        "enforce_eos": True,
        "enforce_bos": False,
        "shuffle": False,
    },
    "model": {"type": "gpt2", "gradient_checkpointing": True},
    "": {
        "hf_save_steps": 10_000,
        "hf_save_path": None,
        "hf_upload": None,
        "initialize_from_hf": False,
        "use_hf_model_config": False,
    },
}


@pytest.mark.parametrize("section", DEFAULTS)
def test_the_settings_of_a_table_have_its_defaults(section):
    value = RunConfig().model_dump(mode="json")
    for part in filter(None, section.split(".")):
        value = value[int(part)] if part.isdigit() else value[part]
    found = {name: value[name] for name in DEFAULTS[section]}
    assert found == DEFAULTS[section]
    assert [type(one) for one in found.values()] == [type(one) for one in DEFAULTS[section].values()]


def test_checkpoints_are_kept_every_ten_thousand_steps_in_the_folder_of_the_run_id():
    checkpointer = RunConfig().trainer.checkpointer
    assert [(entry.every, entry.until) for entry in checkpointer.keep] == [(10_000, None)]
    assert checkpointer.run_folder("run") == "checkpoints/run"


def test_an_empty_config_is_valid_and_has_gpt2_with_adam(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    config = load_config(RunConfig, str(tmp_path / "empty.yaml")).config
    assert (config.model.type, config.model.num_layers, config.optimizer.type) == ("gpt2", 12, "adam")


def test_schedules_have_every_shape_of_the_reference():
    (setting,) = [s for group in describe(RunConfig) for s in group.settings if s.name == "optimizer.lr_schedule"]
    assert set(setting.type.split(" | ")) >= {"constant", "linear", "cosine", "inv_sqrt", "inv"}


def test_skipped_steps_have_their_documented_defaults():
    skip = RunConfig(optimizer={"skip_bad_steps": {}}).optimizer.skip_bad_steps
    assert (skip.rolling_interval_length, skip.sigma_factor) == (128, 6.0)
