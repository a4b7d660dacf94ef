"""Other names of settings, advice, and settings that another type or text source replaces."""

import re

import pytest
import yaml

from lmtrain.config.describe import describe
from lmtrain.config.load import load_config
from lmtrain.config.spellings import other_names
from lmtrain.models.llama.relatives import RELATIVES
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    ("old", "new"), [("batch_size", "train_batch_size"), ("per_device_train_parallelism", "per_device_parallelism")]
)
@pytest.mark.parametrize("by_flag", [False, True])
def test_another_name_sets_the_current_setting_with_a_notice_if_it_is_deprecated(load, old, new, by_flag):
    text, overrides = ("", [(f"trainer.{old}", "8")]) if by_flag else (f"trainer:\n  {old}: 8\n", [])
    config, layer = load(text, *overrides)
    place = f"--trainer.{old}" if by_flag else "main.yaml:2"
    assert getattr(config.trainer, new) == 8
    assert layer.notices == [f"{place}: trainer.{old} is now called trainer.{new}"] * ("train_p" not in old)
    assert str(layer.origin_of(("trainer", new))) == place


@pytest.mark.parametrize("by_flag", ["train_batch_size", "batch_size"])
@pytest.mark.parametrize("in_file", ["train_batch_size", "batch_size"])
def test_the_command_line_wins_with_either_name(load, in_file, by_flag):
    config, _ = load(f"trainer: {{{in_file}: 8}}\n", (f"trainer.{by_flag}", "16"))
    assert config.trainer.train_batch_size == 16


@pytest.mark.parametrize(
    ("text", "include"),
    [
        ("!include other.yaml\ntrainer: {train_batch_size: 4}\n", "trainer: {batch_size: 8}\n"),
        ("trainer:\n  <<: [!include other.yaml]\n  batch_size: 4\n", "train_batch_size: 8\n"),
    ],
)
def test_a_file_wins_over_its_includes_with_either_name(load, text, include):
    config, _ = load(text, other=include)
    assert config.trainer.train_batch_size == 4


def test_both_names_in_one_file_are_an_error_with_both_lines(load):
    with pytest.raises(UserError, match=r"main.yaml:2: trainer.batch_size: .* main.yaml:3"):
        load("trainer:\n  batch_size: 8\n  train_batch_size: 8\n")


def test_a_model_nested_below_its_family_is_unwrapped(load):
    config, layer = load("model:\n  gpt2:\n    num_layers: 2\n", ("model.num_heads", "6"))
    assert (config.model.type, config.model.num_layers, config.model.num_heads) == ("gpt2", 2, 6)
    assert len(layer.notices) == 1
    assert str(layer.origin_of(("model", "num_layers"))) == "main.yaml:3"


def test_a_flag_with_the_family_in_its_name_applies_to_both_forms(load):
    for text in ("model: {gpt2: {num_layers: 2}}\n", "model: {type: gpt2, num_layers: 2}\n"):
        config, _ = load(text, ("model.gpt2.num_layers", "3"))
        assert config.model.num_layers == 3


@pytest.mark.parametrize(
    ("tracker", "types"),
    [
        ("", ["wandb"]),
        ("tracker: {project: p}", ["wandb"]),
        ("tracker: {type: json}", ["json", "wandb"]),
        ("tracker: [{type: json}, {project: p}, {type: noop}]", ["json", "wandb", "noop"]),
        ("wandb: {project: p}", ["wandb"]),
    ],
)
def test_wandb_flags_apply_to_the_wandb_tracker(load, tracker, types):
    config, layer = load(f"trainer: {{{tracker}}}\n", ("trainer.wandb.name", "n"), ("trainer.wandb.group", "g"))
    trackers = config.trainer.tracker
    assert [tracker.type for tracker in trackers] == types
    wandb = next(tracker for tracker in trackers if tracker.type == "wandb")
    assert (wandb.name, wandb.group, wandb.project) == ("n", "g", "p" if "project" in tracker else None)
    assert any(notice.startswith("--trainer.wandb.name: ") for notice in layer.notices)


@pytest.mark.parametrize("text", ["trainer:\n  wandb: {}\n  tracker: {}\n", "trainer:\n  wandb: true\n"])
def test_an_invalid_wandb_section_is_an_error(load, text):
    with pytest.raises(UserError, match=r"^main.yaml:2: trainer.wandb: "):
        load(text)


@pytest.mark.parametrize("at", ["data", "data.configs.chats"])
def test_levanters_formats_of_instructions_load_with_a_notice(load, at):
    inner = "format: {type: chat, mask_user_turns: true}"
    text = f"data:\n  {inner}\n" if at == "data" else f"data:\n  configs:\n    chats:\n      {inner}\n"
    config, layer = load(text)
    source = config.data if at == "data" else config.data.configs["chats"]
    assert (source.format.type, source.format.loss_on) == ("chat", "assistant")
    assert f"{at}.format.mask_user_turns" in layer.notices[0]
    old = inner.replace("chat, mask_user_turns: true", "supervised, input_field: q, output_field: a")
    config, layer = load(text.replace(inner, old))
    source = config.data if at == "data" else config.data.configs["chats"]
    assert (source.format.type, source.format.input_field, source.format.output_field) == ("completion", "q", "a")
    assert len(layer.notices) == 1
    assert load("data: {format: {type: chat, mask_user_turns: false}}\n")[0].data.format.loss_on == "all"
    with pytest.raises(UserError, match="mask_user_turns"):
        load("data: {format: {type: chat, mask_user_turns: false, loss_on: last}}\n")


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


@pytest.mark.parametrize(
    ("kind", "flag"),
    [*zip(DATA, DATA, strict=True), ("demo", "urls"), ("urls", "configs"), ("id", "demo"), ("configs", "id")],
)
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
    ignored = ("tracker.project (main.yaml:3)", "optimizer.nesterov (main.yaml:6)", "model.mlp_scale (main.yaml:9)")
    assert [name in notice for name, notice in zip(ignored, tree.notices, strict=True)] == [True] * 3


SETTINGS = {setting.name for group in describe(RunConfig) for setting in group.settings}


def test_advice_names_existing_settings_for_a_name_that_does_not_exist():
    advice = other_names("settings")
    assert not [setting for setting in SETTINGS if setting.rpartition(".")[2] in advice]
    sections = "data|model|trainer|optimizer|lora|objective"
    named = re.findall(
        rf"\b(?:{sections})\.[a-z_0-9.]*[a-z_0-9]|\bhf_[a-z_]+|\binitialize_from_hf", " ".join(advice.values())
    )
    known = {*SETTINGS, *(setting.rpartition(".")[0] for setting in SETTINGS)}
    assert [name for name in named if name not in known and not name.endswith(".type")] == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"base_model": "acme/base"}, "initialize_from_hf"),
        ({"micro_batch_size": 2}, "trainer.train_batch_size"),
        ({"trainer": {"gradient_accumulation_steps": 8}}, "trainer.per_device_parallelism"),
        ({"sequence_len": 2048}, "model.seq_len"),
        ({"num_train_epochs": 3}, "epoch"),
        ({"load_in_4bit": True}, "lora.base_quantization"),
        ({"neftune_noise_alpha": 5}, "NEFTune"),
        ({"datasets": [{"path": "acme/chats"}]}, "data.id"),
        ({"val_set_size": 0.05}, "data.validation_fraction"),
        ({"learning_rate": 2e-5}, "optimizer.learning_rate"),
        ({"trainer": {"warmup": 10}}, "optimizer.warmup"),
        ({"chat_template": "chatml"}, "data.format.chat_template"),
        ({"model": {"type": "qwen3"}}, "type: llama"),
        ({"optimizer": {"type": "adamw_torch_fused"}}, "type: adam"),
        ({"optimizer": "paged_adamw_8bit"}, "which is AdamW"),
        ({"objective": {"type": "ipo"}}, "loss: ipo"),
        ({"lora": {"use_dora": True}}, "unsupported: DoRA"),
        ({"ref_model": "acme/base"}, "remove it"),
        ({"load_in_8bit": False}, "no such setting; remove it"),
        ({"val_set_size": 0}, "no such setting; remove it"),
        ({"assistant_only_loss": False}, "loss_on"),
        ({"trainer": {"early_stopping": {"metric": "eval_loss"}}}, "eval/loss"),
    ],
)
def test_names_of_other_systems_lead_to_the_setting(tmp_path, written, expected):
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(written))
    with pytest.raises(UserError, match=rf"theirs\.yaml:\d.*{re.escape(expected)}"):
        load_config(RunConfig, str(path))


def test_types_of_models_of_the_hub_lead_to_their_family():
    families = other_names("families")
    assert {name: "llama" for name in RELATIVES if name != "llama"}.items() <= families.items()


def test_an_unknown_setting_gets_the_advice_with_its_place(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"optimizer": {"cooldown": 0.1}, "model": {"n_layer": 2}}))
    with pytest.raises(UserError) as error:
        load_config(RunConfig, str(path), [("trainer.require_accelerator", "true"), ("trainer.num_train_step", "3")])
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    for place, advice in (
        (f"{path}:4: optimizer.cooldown: ", "optimizer.decay"),
        (f"{path}:2: model.n_layer: ", "model.num_layers"),
        ("--trainer.require_accelerator: ", "remove it"),
        ("--trainer.num_train_step: ", "trainer.num_train_steps?"),
    ):
        assert any(line.startswith(place) and advice in line for line in lines), place


@pytest.mark.parametrize(("by_flag", "listed"), [(False, False), (True, True)])
def test_keywords_of_wandb_are_set_in_init_with_a_notice(load, by_flag, listed):
    tracker = "{project: p, notes: n, job_type: null, init: {force: true}}"
    text = f"trainer:\n  tracker: {f'[{{type: json}}, {tracker}]' if listed else tracker}\n"
    flags = [("trainer.wandb.notes" if listed else "trainer.tracker.notes", "m")] if by_flag else []
    config, layer = load(text, *flags)
    wandb = config.trainer.tracker[-1]
    assert (wandb.project, wandb.init) == ("p", {"force": True, "notes": "m" if by_flag else "n"})
    assert sum("init.notes" in notice for notice in layer.notices) == 1 + by_flag


def test_a_keyword_of_wandb_that_is_set_twice_is_an_error_and_that_of_another_tracker_is_unchanged(load):
    with pytest.raises(UserError, match=r"main.yaml:2: trainer\.tracker\.notes"):
        load("trainer:\n  tracker: {notes: a, init: {notes: b}}\n")
    with pytest.raises(UserError, match=r"trainer\.tracker\.notes"):
        load("trainer: {tracker: {type: json, notes: a}}\n")
