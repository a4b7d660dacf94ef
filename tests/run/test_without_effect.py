"""Settings that have no effect without another one."""

import pytest
from run.configs import build

from lmtrain.run.config import _NEEDS, RunConfig, check_evaluation, without_effect
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ({"optimizer__rewarmup": 5}, {"optimizer__cycles": 2}),
        ({"optimizer__min_lr_ratio": 0.5, "optimizer__lr_schedule": "constant"}, {"optimizer__lr_schedule": "cosine"}),
        ({"optimizer__weight_decay_modules": "a"}, {"optimizer__weight_decay": 0.1}),
        ({"trainer__sample_length": 8}, {"trainer__sample_prompts": ["a"]}),
        ({"trainer__steps_per_eval": 8}, {"data__validation_urls": ["a"]}),
        ({"trainer__max_eval_batches": 8}, {"data__validation_urls": ["a"]}),
        ({"data__max_mirror_bytes": 8}, {"data__cache_dir": "gs://a/b"}),
        ({"data__max_bad_fraction": 0.5}, {"data__on_bad_record": "skip"}),
    ],
)
def test_a_setting_without_the_one_that_it_needs_is_reported(setting, needed):
    name = next(iter(setting)).replace("__", ".")
    (message,) = without_effect(build(**setting)).values()
    assert message.startswith(f"{name}: has no effect")
    assert without_effect(build(**{**setting, **needed})) == {}


def test_exports_need_a_folder_or_a_repository():
    assert list(without_effect(RunConfig(hf_save_steps=5))) == [("hf_save_steps",)]
    assert without_effect(RunConfig(hf_save_steps=5, hf_upload="a/b")) == {}


def test_defaults_are_not_reported_and_all_names_exist():
    assert without_effect(RunConfig()) == {}
    config = RunConfig(initialize_from_hf="a/b", lora={}, eval_harness={"task_spec": ["a"]})
    for name in _NEEDS:
        section = config
        for part in name.split("."):
            section = getattr(section, part)


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("early_stopping", {"early_stopping": {}}),
        ("checkpointer.keep_best", {"checkpointer": {"keep_best": {}}}),
    ],
)
def test_what_needs_an_evaluation_is_refused_without_one(name, trainer):
    config = RunConfig.model_validate({"trainer": trainer})
    check_evaluation(config, has_validation=True)
    with pytest.raises(UserError, match=rf"^trainer\.{name}: the run has no evaluation"):
        check_evaluation(config, has_validation=False)
    harness = {"eval_harness": {"task_spec": ["one"]}}
    check_evaluation(RunConfig.model_validate({"trainer": trainer, **harness}), has_validation=False)
