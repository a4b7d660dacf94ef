"""The config of a run: run id, identity, checks across sections, and a description of every setting."""

import json
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from lmtrain.config.errors import UserError
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.identity import identity, run_id

BASE = {
    "data": {"train_urls": ["a.jsonl"], "tokenizer": "t"},
    "model": {"hidden_dim": 32, "num_heads": 2},
    "trainer": {"num_train_steps": 100},
}


def build(**changes):
    """A config with `section__name=value` changed."""
    data = {name: dict(section) for name, section in BASE.items()}
    for path, value in changes.items():
        section, name = path.split("__")
        data.setdefault(section, {})[name] = value
    return RunConfig.model_validate(data)


WANDB = {"type": "wandb", "id": "from-wandb"}
MADE = run_id(build(), "stem", {})


@pytest.mark.parametrize(
    ("changes", "environment", "expected"),
    [
        ({"trainer__id": "mine", "trainer__tracker": WANDB}, {"RUN_ID": "from-env"}, "mine"),
        ({"trainer__tracker": WANDB}, {"RUN_ID": "from-env"}, "from-env"),
        ({"trainer__tracker": WANDB}, {}, "from-wandb"),
        ({"trainer__tracker": WANDB}, {"RUN_ID": ""}, "from-wandb"),
        ({"trainer__tracker": [{"type": "json"}, {"type": "wandb"}, WANDB]}, {}, "from-wandb"),
        ({}, {}, MADE),
        ({"trainer__tracker": {"type": "wandb"}}, {}, MADE),
    ],
)
def test_the_run_id_is_the_first_of_setting_environment_wandb_and_hash(changes, environment, expected):
    assert run_id(build(**changes), "stem", environment) == expected


def test_the_generated_id_is_stem_and_hash_and_not_random():
    assert run_id(build(), "stem", {}) == MADE
    assert MADE.startswith("stem-")
    assert len(MADE) == len("stem-") + 6
    assert run_id(build(), "other", {}) == MADE.replace("stem", "other")


@pytest.mark.parametrize("name", ["a", "0", "run.v2_x-1", "A" * 200])
def test_valid_run_ids(name):
    assert run_id(build(trainer__id=name), "stem", {}) == name


@pytest.mark.parametrize(
    ("stem", "expected"),
    [("my run (2)", "my-run-2-"), (".hidden", "hidden"), ("größe", "gr-e"), ("", "run"), ("x" * 300, "x" * 100)],
)
def test_any_name_of_a_config_file_gives_a_valid_run_id(stem, expected):
    assert run_id(build(), stem, {}) == MADE.replace("stem", expected)


@pytest.mark.parametrize(
    "name", ["../x", "a/b", ".", "..", ".x", "-x", " a", "a b", "ü", "a\n", "${run_id}", "a:b", "A" * 201]
)
@pytest.mark.parametrize("source", ["setting", "environment", "wandb"])
def test_an_invalid_run_id_is_refused_from_every_source(name, source):
    changes = {"setting": {"trainer__id": name}, "wandb": {"trainer__tracker": {"id": name}}}.get(source, {})
    with pytest.raises(UserError, match=r"run id .*use at most 200 letters"):
        run_id(build(**changes), "stem", {"RUN_ID": name} if source == "environment" else {})


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__num_train_steps": 200},
        {"data__cache_dir": "elsewhere"},
        {"data__num_preprocess_workers": 3},
        {"trainer__tracker": [{"type": "tensorboard"}]},
        {"trainer__tracker": []},
        {"trainer__model_axis_size": 2},
        {"trainer__fsdp_axis": None},
        {"trainer__tensor_parallel_axes": ["mlp"]},
        {"trainer__steps_per_eval": 7},
        {"trainer__max_eval_batches": 7},
        {"trainer__per_device_parallelism": 1},
        {"trainer__log_dir": "elsewhere"},
        {"trainer__checkpointer": {"save_interval": "1m", "keep": []}},
        {"model__gradient_checkpointing": False},
        {"model__scan_layers": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_run_id_does_not_depend_on(changes):
    assert build(**changes) != build()
    assert identity(build(**changes)) == identity(build())
    assert run_id(build(**changes), "stem", {}) == MADE


@pytest.mark.parametrize(
    "changes",
    [
        {"data__train_urls": ["b.jsonl"]},
        {"data__validation_urls": ["b.jsonl"]},
        {"data__tokenizer": "u"},
        {"data__text_key": "body"},
        {"data__enforce_eos": False},
        {"data__shuffle": True},
        {"model__hidden_dim": 64},
        {"model__seq_len": 64},
        {"model__resid_pdrop": 0.1},
        {"optimizer__learning_rate": 2e-4},
        {"optimizer__warmup": 1},
        {"optimizer__warmup": 1.0},
        {"trainer__seed": 1},
        {"trainer__train_batch_size": 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_run_id_depends_on(changes):
    assert run_id(build(**changes), "stem", {}) != MADE


def test_a_warmup_of_1_step_differs_from_one_of_the_entire_run():
    assert run_id(build(optimizer__warmup=1), "s", {}) != run_id(build(optimizer__warmup=1.0), "s", {})


def test_the_demo_with_its_default_tokenizer_and_with_another_are_different_runs():
    demo = RunConfig.model_validate({"data": {"demo": "d"}})
    other = RunConfig.model_validate({"data": {"demo": "d", "tokenizer": "gpt2"}})
    assert demo.data.tokenizer != other.data.tokenizer
    assert run_id(demo, "stem", {}) != run_id(other, "stem", {})


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"optimizer__warmup": 101}, "optimizer.warmup", "101 steps are longer than the run"),
        ({"optimizer__warmup": 0.5, "optimizer__decay": 0.6}, "optimizer.decay", "60 steps, with 50 of warmup"),
        ({"trainer__per_device_parallelism": 3}, "trainer.per_device_parallelism", "3 does not divide"),
    ],
)
def test_conflicts_between_sections_name_the_setting(changes, field, problem):
    with pytest.raises(ValidationError, match=problem) as caught:
        build(**changes)
    assert [error["ctx"]["field"] for error in caught.value.errors()] == [field]


def test_only_one_initial_model_can_be_set():
    with pytest.raises(ValidationError, match=r"set together with trainer\.initialize_from"):
        RunConfig(initialize_from_hf="a/b", trainer={"initialize_from": "c"})
    with pytest.raises(ValidationError, match="initialize_from_hf, which is not set"):
        RunConfig(use_hf_model_config=True)


def test_secrets_in_urls_are_neither_saved_nor_part_of_the_identity():
    url = "https://me:secret@host/a.jsonl?signature=secret"
    config = RunConfig(data={"train_urls": [url]})
    assert "secret" not in json.dumps([resolved(config), identity(config)])
    assert run_id(config, "x", {}) == run_id(RunConfig(data={"train_urls": [url.replace("secret", "other")]}), "x", {})


def sections(annotation):
    """All settings sections in an annotation, recursively."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for argument in get_args(annotation):
        yield from sections(argument)


SECTIONS = list(dict.fromkeys(sections(RunConfig)))


def test_the_sections_of_every_package_are_found():
    names = {section.__name__ for section in SECTIONS}
    expected = {"DataConfig", "Gpt2Config", "TrainerConfig", "AdamConfig", "CheckpointerConfig", "KeepInterval"}
    assert expected | {"WandbConfig", "TensorboardConfig", "JsonConfig", "NoopConfig"} <= names


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_has_a_description(section):
    assert section.__doc__
    without = [name for name, field in section.model_fields.items() if not (field.description or "").strip()]
    assert without == []


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
    ("weights", "message"),
    [({"c": 1.0}, "unknown source 'c'"), ({}, "names no source"), ({"a": -1}, "greater than or equal to 0")],
)
def test_weights_of_unknown_sources_and_empty_weights_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        build(**SOURCES, objective__type="weighted_cross_entropy", objective__source_weights=weights)
    if "c" in weights:
        with pytest.raises(ValidationError, match=message):
            build(objective__type="weighted_cross_entropy", objective__source_weights=weights)


def test_another_objective_changes_the_run_id_and_the_default_does_not():
    assert run_id(build(objective__type="cross_entropy", objective__label_smoothing=0.0), "stem", {}) == MADE
    ids = [
        run_id(build(**SOURCES), "stem", {}),
        run_id(build(**SOURCES, objective__label_smoothing=0.1), "stem", {}),
        run_id(
            build(**SOURCES, objective__type="weighted_cross_entropy", objective__source_weights={"a": 2}), "stem", {}
        ),
        run_id(
            build(**SOURCES, objective__type="weighted_cross_entropy", objective__source_weights={"b": 2}), "stem", {}
        ),
    ]
    assert len(set(ids)) == 4
