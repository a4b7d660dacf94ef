"""A run: its folders, resolved settings, identity, and secrets that were saved without their values."""

import json

import pytest
import yaml
from run.configs import build

from lmtrain.config.describe import show
from lmtrain.config.load import load_config
from lmtrain.config.section import Role, settings_of
from lmtrain.config.tree import Origin
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import (
    ResolvedSettings,
    Run,
    fill_masked,
    identity,
    require_secrets,
    resolve,
    run_id,
    without_tunable,
)
from lmtrain.runtime.errors import UserError


@pytest.fixture
def run(settings, write_config):
    loaded = load_config(RunConfig, str(write_config(settings)))
    return Run(loaded, "a-run")


def test_found_settings_override_the_config_and_have_their_source_as_origin(run):
    assert (run.logs, run.checkpoints) == ("logs/a-run", "checkpoints/a-run")
    assert resolve(run, None) is run
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
    with pytest.raises(UserError, match=r"^base: its config\.json .*model\.num_heads: 5"):
        resolve(run, ResolvedSettings("base: its config.json", {"model": {"type": "gpt2", "num_heads": 5}}))
    with pytest.raises(UserError, match=r"^epoch 1 .*trainer\.num_train_steps: "):
        resolve(run, ResolvedSettings("epoch 1", {"trainer": {"num_train_steps": 0}}))


SOURCES = {"data__train_urls": None, "data__configs": {"a": {"train_urls": ["a.jsonl"]}, "b": {"id": "owner/b"}}}
WANDB = {"type": "wandb", "id": "from-wandb"}
MADE = run_id(build(), "stem", {})


@pytest.mark.parametrize(
    ("changes", "environment", "expected"),
    [
        ({"trainer__id": "mine", "trainer__tracker": WANDB}, {"RUN_ID": "from-env"}, "mine"),
        ({"trainer__tracker": WANDB}, {"RUN_ID": "from-env"}, "from-env"),
        ({"trainer__tracker": [{"type": "json"}, {"type": "wandb"}, WANDB]}, {}, "from-wandb"),
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


@pytest.mark.parametrize(
    ("stem", "expected"),
    [("my run (2)", "my-run-2-"), (".hidden", "hidden"), ("größe", "gr-e"), ("", "run"), ("x" * 300, "x" * 100)],
)
def test_any_name_of_a_config_file_gives_a_valid_run_id(stem, expected):
    assert run_id(build(), stem, {}) == MADE.replace("stem", expected)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *(("setting", name) for name in ("../x", "a/b", ".", "..", ".x", "-x", "a b", "ü", "a:b", "A" * 201)),
        *(("environment", "../x"), ("wandb", "../x")),
    ],
)
def test_an_invalid_run_id_is_refused_from_every_source(name, source):
    changes = {"setting": {"trainer__id": name}, "wandb": {"trainer__tracker": {"id": name}}}.get(source, {})
    with pytest.raises(UserError, match=r"run id "):
        run_id(build(**changes), "stem", {"RUN_ID": name} if source == "environment" else {})


def test_an_empty_variable_of_the_run_id_is_refused_where_it_counts():
    with pytest.raises(UserError, match=r"^RUN_ID: "):
        run_id(build(), "stem", {"RUN_ID": " "})
    assert run_id(build(trainer__id="mine"), "stem", {"RUN_ID": ""}) == "mine"


CHANGES = {
    "data": {
        "train_urls": ["b"],
        "validation_urls": ["b"],
        "tokenizer": "u",
        "shuffle": True,
        "cache_dir": "elsewhere",
        "text_key": "body",
        "enforce_eos": False,
        "num_preprocess_workers": 3,
    },
    "model": {
        "hidden_dim": 64,
        "seq_len": 64,
        "resid_pdrop": 0.1,
        "gradient_checkpointing": False,
        "scan_layers": False,
    },
    "optimizer": {"learning_rate": 2e-4, "warmup": 1},
    "trainer": {"seed": 1, "train_batch_size": 64, "num_train_steps": 200, "tracker": [], "model_axis_size": 2}
    | {"fsdp_axis": None, "per_device_parallelism": 1, "checkpointer": {"save_interval": "1m", "keep": []}}
    | {"tensor_parallel_axes": ["mlp"], "steps_per_eval": 7, "max_eval_batches": 7, "log_dir": "elsewhere"},
}
# written out, and not from the roles: a setting with another role renames runs
SAME_RUN = {
    *("cache_dir", "num_preprocess_workers", "gradient_checkpointing", "scan_layers", "num_train_steps", "tracker"),
    *("model_axis_size", "fsdp_axis", "tensor_parallel_axes", "per_device_parallelism", "checkpointer"),
    *("steps_per_eval", "max_eval_batches", "log_dir"),
}


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in CHANGES for name in CHANGES[section]])
def test_the_run_id_depends_on_settings_of_some_roles(section, name):
    changed = build(**{f"{section}__{name}": CHANGES[section][name]})
    assert changed != build()
    free = settings_of(type(getattr(changed, section)), Role.CHANGEABLE, Role.EXECUTION)
    assert (identity(changed) == identity(build())) == (run_id(changed, "stem", {}) == MADE) == (name in free)
    assert (name in free) == (name in SAME_RUN)


def test_a_saved_identity_has_the_initial_state_but_is_compared_without_it():
    first, other = (RunConfig(trainer={"initialize_from": path}) for path in ("a", "b"))
    assert identity(first) != identity(other)
    assert without_tunable(identity(first)) == without_tunable(identity(other))


def test_the_demo_with_its_default_tokenizer_and_with_another_are_different_runs():
    demo = RunConfig.model_validate({"data": {"demo": "d"}})
    other = RunConfig.model_validate({"data": {"demo": "d", "tokenizer": "gpt2"}})
    assert demo.data.tokenizer != other.data.tokenizer
    assert run_id(demo, "stem", {}) != run_id(other, "stem", {})


def test_another_objective_changes_the_run_id_and_the_default_does_not():
    assert run_id(build(objective__type="cross_entropy", objective__label_smoothing=0.0), "stem", {}) == MADE
    weighted = [{"objective__type": "weighted_cross_entropy", "objective__source_weights": {name: 2}} for name in "ab"]
    ids = [
        run_id(build(**SOURCES, **changes), "stem", {})
        for changes in ({}, {"objective__label_smoothing": 0.1}, *weighted)
    ]
    assert len(set(ids)) == 4


def test_another_base_of_a_transfer_is_another_run():
    base = {"hidden_dim": 32, "num_heads": 2, "num_layers": 2}
    runs = [build(), *(build(transfer__base=base | {"num_layers": layers}) for layers in (1, 2))]
    assert len({run_id(run, "stem", {}) for run in runs}) == 3
    assert "transfer" not in identity(build())


SIGNED = "https://me:word@host/a.jsonl?version=1&X-Amz-Date={0}&X-Amz-Signature={0}"


def test_the_identity_has_no_secrets_so_a_renewed_signature_is_the_same_run():
    first, renewed = (build(data__train_urls=[SIGNED.format(number)]) for number in (1, 2))
    assert run_id(first, "stem", {}) == run_id(renewed, "stem", {})
    assert identity(first)["data"]["train_urls"] == ["https://***@host/a.jsonl?version=1&***"]
    older = build(data__train_urls=["https://me:word@host/a.jsonl?X-Amz-Date=1&X-Amz-Signature=2"])
    assert identity(older)["data"]["train_urls"] == ["https://***@host/a.jsonl?***"]  # as earlier versions hashed it
    assert "me:word" not in json.dumps(resolved(first))
    other = build(data__train_urls=[SIGNED.format(1).replace("version=1", "version=2")])
    assert run_id(other, "stem", {}) != run_id(first, "stem", {})
    lora = {"initialize_from": "https://host/adapter?token=abc"}
    config = RunConfig.model_validate({"initialize_from_hf": "https://me:word@host/model", "lora": lora})
    assert identity(config)["initialize_from_hf"] == "https://***@host/model"
    assert identity(config)["lora"]["initialize_from"] == "https://host/adapter?***"


WITH_SECRETS = {"type": "wandb", "settings": {"api_key": "wandb-key"}, "config": {"deep": {"password": 12345678}}}
SETTINGS = {
    "data": {"train_urls": ["https://me:word@host/a.jsonl?version=1&sig=b", "plain.jsonl"]},
    "trainer": {"tracker": WITH_SECRETS, "checkpointer": {"base_path": "sftp://me:word@host/checkpoints"}},
}
PLAIN = {"data": {"train_urls": ["plain.jsonl"]}, "trainer": {"tracker": {"type": "json"}}}


@pytest.fixture
def load(tmp_path):
    """`load(settings)` loads a file with them."""

    def load_settings(settings, name="a.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(settings))
        return load_config(RunConfig, str(path))

    return load_settings


@pytest.fixture
def saved(load):
    """The config with SETTINGS, as its run has saved it."""
    return load(resolved(load(SETTINGS).config), "saved.yaml")


def test_secrets_are_those_of_the_config_that_is_given(load, saved):
    given = load(SETTINGS).config
    assert saved.config != given
    filled = fill_masked(saved, given, {})
    assert filled.config == given
    require_secrets(filled, trains=True)
    other = {"data": {"train_urls": ["https://me:word@host/b.jsonl?sig=b"]}}  # a setting with another value
    assert fill_masked(saved, load(other).config, {}).config == saved.config


def test_a_setting_of_wandb_is_left_to_its_environment_variable(saved):
    filled = fill_masked(saved, None, {"WANDB_API_KEY": "from environment", "WANDB_PASSWORD": "of no setting"})
    (tracker,) = filled.config.trainer.tracker
    assert tracker.init == {"settings": {}, "config": {"deep": {"password": "***"}}}


def test_a_config_without_masked_values_is_unchanged(load):
    loaded = load(PLAIN)
    assert fill_masked(loaded, RunConfig(), {"WANDB_API_KEY": "x"}) is loaded
    require_secrets(loaded, trains=True)


def test_missing_secrets_are_an_error_that_names_all_fields(saved):
    with pytest.raises(UserError) as error:
        require_secrets(saved, trains=True)
    for name in ("checkpointer.base_path", "[0].init.config.deep.password", "settings.api_key: set WANDB_API_KEY"):
        assert name in str(error.value)


def test_only_training_needs_the_secrets_of_trackers_and_of_initial_states(load):
    settings = SETTINGS | {"trainer": {"tracker": WITH_SECRETS, "initialize_from": "sftp://me:word@host/checkpoints"}}
    saved = load(resolved(load(settings).config), "saved.yaml")
    require_secrets(saved)
    with pytest.raises(UserError, match=r"trainer\.tracker\[0\]"):
        require_secrets(saved, trains=True)
