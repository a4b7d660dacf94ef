"""Settings of a run, and those without effect."""

import pytest
from pydantic import ValidationError
from run.configs import build

from lmtrain.run.config import _NEEDS, RunConfig, check_evaluation, without_effect
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    "changes",
    [
        {"model__num_heads": 10**18},
        {"trainer__num_train_steps": 10**30},
        {"model__num_layers": 10_000, "model__hidden_dim": 2**24, "model__num_heads": 2},
        {"optimizer__cycle_length": 1, "trainer__num_train_steps": 10**9},
        {"optimizer__cycles": 10**9, "trainer__num_train_steps": 10**9},
        {"model__type": "llama", "model__moe": {"num_experts": 10**9}},
    ],
)
def test_sizes_that_are_mistakes_are_refused_before_anything_of_that_size_is_made(changes):
    with pytest.raises(ValidationError, match=r"at most|less than or equal to|below|more than 10\^17"):
        build(**changes)


def test_only_one_initial_model_can_be_set():
    with pytest.raises(ValidationError, match=r"trainer\.initialize_from"):
        RunConfig(initialize_from_hf="a/b", trainer={"initialize_from": "c"})
    with pytest.raises(ValidationError, match="initialize_from_hf"):
        RunConfig(use_hf_model_config=True)


def test_reset_positions_with_alibi_requires_mask_across_documents():
    RunConfig(model={"type": "mpt"}, data={"reset_positions": True})
    RunConfig(model={"type": "llama"}, data={"reset_positions": True, "mask_across_documents": False})
    with pytest.raises(ValidationError, match=r"mpt .*ALiBi"):
        RunConfig(model={"type": "mpt"}, data={"reset_positions": True, "mask_across_documents": False})


SOURCES = {"data__train_urls": None, "data__configs": {"a": {"train_urls": ["a.jsonl"]}, "b": {"id": "owner/b"}}}


def test_loss_weights_are_in_the_order_of_the_sources():
    weighted = {"objective__type": "weighted_cross_entropy", "objective__source_weights": {"b": 2.5}}
    config = build(**SOURCES, **weighted)
    assert config.loss_weights == {"a": 1.0, "b": 2.5}
    assert config.batch_types["loss_weights"] == "float32"
    assert build(**SOURCES).loss_weights is None
    assert "loss_weights" not in build(**SOURCES).batch_types


@pytest.mark.parametrize(
    ("weights", "message"), [({"c": 1.0}, "'c'"), ({}, "source_weights"), ({"a": -1}, "source_weights")]
)
def test_weights_of_unknown_sources_and_empty_weights_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        build(**SOURCES, objective__type="weighted_cross_entropy", objective__source_weights=weights)
    if "c" in weights:
        with pytest.raises(ValidationError, match=message):
            build(objective__type="weighted_cross_entropy", objective__source_weights=weights)


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("trainer.num_train_steps", [0, 1.5]),
        ("trainer.model_axis_size", [0, 1.5, True, None]),
        ("trainer.batch_axis", ["rows", ""]),
        ("trainer.crash_on_nan", ["perhaps"]),
        ("trainer.mp", [32]),
        ("trainer.checkpointer.keep", [None, [{"every": 0}], [{"every": 1, "until": 0}], [{"until": 5}]]),
        ("trainer.checkpointer.save_interval", [15, "15", "-5m", True]),
        ("trainer.checkpointer.verify_on_restore", ["none", True, None, "FULL"]),
        ("trainer.checkpointer.on_save_error", ["ignore", False]),
        ("trainer.checkpointer.staging_dir", [["/scratch"]]),
        ("optimizer.learning_rate", [0, float("inf")]),
        ("optimizer.decay", [2.0]),
        ("optimizer.weight_decay", [-0.1]),
        ("data.train_weights", [{"a": -1}, {"a": "much"}, [[0, {"a": -1}]], [[0, {"a": 1}, 3]], [{"a": 1}]]),
    ],
)
def test_values_outside_their_bounds_are_refused_with_the_setting(setting, values):
    *sections, name = setting.split(".")
    for value in values:
        settings = {"configs": {"a": {"train_urls": ["a"]}}, name: value} if name == "train_weights" else {name: value}
        for section in reversed(sections):
            settings = {section: settings}
        with pytest.raises(ValidationError) as refused:
            RunConfig.model_validate(settings)
        assert all(name in error["loc"] for error in refused.value.errors()), value


def test_samples_that_do_not_fit_into_the_model_are_an_error_of_the_config():
    changes = {"trainer__sample_prompts": ["a"], "model__seq_len": 128}
    with pytest.raises(ValidationError) as caught:
        build(**changes, trainer__sample_length=128)
    assert [error["ctx"]["field"] for error in caught.value.errors()] == ["trainer.sample_length"]
    build(**changes, trainer__sample_length=127)


@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ({"optimizer__rewarmup": 5}, {"optimizer__cycles": 2}),
        ({"optimizer__min_lr_ratio": 0.5, "optimizer__lr_schedule": "constant"}, {"optimizer__lr_schedule": "cosine"}),
        ({"trainer__sample_length": 8}, {"trainer__sample_prompts": ["a"]}),
        ({"trainer__steps_per_eval": 8}, {"data__validation_urls": ["a"]}),
        ({"data__max_mirror_bytes": 8}, {"data__cache_dir": "gs://a/b"}),
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
    [("early_stopping", {"early_stopping": {}}), ("checkpointer.keep_best", {"checkpointer": {"keep_best": {}}})],
)
def test_what_needs_an_evaluation_is_refused_without_one(name, trainer):
    config = RunConfig.model_validate({"trainer": trainer})
    check_evaluation(config, has_validation=True)
    with pytest.raises(UserError, match=rf"^trainer\.{name}: the run has no evaluation"):
        check_evaluation(config, has_validation=False)
    harness = {"eval_harness": {"task_spec": ["one"]}}
    check_evaluation(RunConfig.model_validate({"trainer": trainer, **harness}), has_validation=False)
