"""Loading a config: look-up, and one report of all problems with file, line, name and suggestion."""

import pytest

from lmtrain.config.errors import UserError
from lmtrain.config.load import find_config, load_config
from lmtrain.run.config import RunConfig

KEEP = "trainer:\n  checkpointer:\n    keep:\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(folder, text, overrides=()):
    """The lines of the report on a broken `c.yaml`."""
    (folder / "c.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(RunConfig, "c.yaml", overrides)
    return str(caught.value).splitlines()


# (the file, the exact line of the report)
BROKEN = [
    ("model:\n  sql_len: 4\n", "c.yaml:2: model.sql_len: no such setting; did you mean model.seq_len?"),
    ("modle: {}\n", "c.yaml:1: modle: no such setting; did you mean model?"),
    ("zzzz: 4\n", "c.yaml:1: zzzz: no such setting"),
    (
        "\n\nmodel:\n  learning_rate: 4\n",
        "4: model.learning_rate: no such setting; did you mean optimizer.learning_rate?",
    ),
    ("seq_len: 4\n", "c.yaml:1: seq_len: no such setting; did you mean model.seq_len?"),
    (
        "trainer:\n  tracker:\n    type: tensorboard\n    logdirr: x\n",
        "c.yaml:4: trainer.tracker.logdirr: no such setting; did you mean trainer.tracker.logdir?",
    ),
    (
        "trainer:\n  tracker:\n    - type: json\n    - projct: x\n",
        "c.yaml:4: trainer.tracker[1].projct: no such setting",
    ),
    (KEEP + "      - evry: 3\n", "c.yaml:4: trainer.checkpointer.keep[0].every: this setting is required"),
    (KEEP + "      - until: 3\n", "c.yaml:4: trainer.checkpointer.keep[0].every: this setting is required"),
    (
        KEEP + "      - {every: 3, until: 9}\n      - {every: 4, until: 9}\n",
        "c.yaml:3: trainer.checkpointer.keep: 'until'",
    ),
    (KEEP + "      - every: 3\n      - every: 4\n", "only the last entry may be without 'until'"),
    ("model:\n  seq_len: abc\n", "c.yaml:2: model.seq_len: expected a whole number, not"),
    ("model:\n  seq_len: 64.5\n", "c.yaml:2: model.seq_len: expected a whole number"),
    ("model:\n  seq_len: true\n", "c.yaml:2: model.seq_len: expected a number, not true or false"),
    ("model:\n  seq_len: 1\n", "c.yaml:2: model.seq_len: expected greater than or equal to 2, not 1"),
    ("model:\n  seq_len: {a: 3}\n", "c.yaml:2: model.seq_len: expected a whole number"),
    ("model:\n  scan_layers: 'maybe'\n", "c.yaml:2: model.scan_layers: expected true or false"),
    (
        "model:\n  num_heads: 5\n",
        "c.yaml:2: model.num_heads: 5 does not divide hidden_dim 768; num_heads could be 4 or 6",
    ),
    ("model:\n  type: lama\n", "c.yaml:2: model.type: no such model 'lama'; did you mean 'llama'?"),
    (
        "optimizer:\n  type: sgd\n",
        "c.yaml:2: optimizer.type: no such optimizer 'sgd'; expected adam, sophia-h, sophia-g, lion, muon or adafactor",
    ),
    (
        "optimizer:\n  lr_schedule: cosin\n",
        ", not 'cosin'; did you mean 'cosine'?",
    ),
    ("optimizer:\n  learning_rate: .nan\n", "c.yaml:2: optimizer.learning_rate: expected"),
    ("optimizer:\n  learning_rate: .inf\n", "c.yaml:2: optimizer.learning_rate: expected"),
    ("optimizer:\n  beta1: 1.0\n", "c.yaml:2: optimizer.beta1: expected less than 1, not 1.0"),
    (
        "optimizer:\n  warmup: 1.5\n",
        "c.yaml:2: optimizer.warmup: expected a fraction from 0.0 to 1.0, or a whole number",
    ),
    ("optimizer:\n  warmup: -1\n", "c.yaml:2: optimizer.warmup: expected a whole number of steps, 0 or more, not -1"),
    ("data:\n  train_urls: a.jsonl\n", "c.yaml:2: data.train_urls: expected a list, not 'a.jsonl'"),
    ("data:\n  train_urls:\n    - a\n    - 3\n", "c.yaml:4: data.train_urls[1]: expected text, not 3"),
    (
        "data:\n  demo: d\n  train_urls: [a]\n",
        "c.yaml:2: data.demo: set together with train_urls; remove one (demo: null turns it off)",
    ),
    (
        "trainer:\n  checkpointer:\n    save_interval: 15\n",
        "3: trainer.checkpointer.save_interval: a duration needs a unit",
    ),
    ("trainer:\n  mp: f16\n", "c.yaml:2: trainer.mp: float16 needs loss scaling"),
    (
        "trainer:\n  per_device_parallelism: 0\n",
        "c.yaml:2: trainer.per_device_parallelism: expected -1 (automatic), or 1 or more, not 0",
    ),
    (
        "trainer:\n  tracker: {type: foo}\n",
        "c.yaml:2: trainer.tracker.type: no such tracker 'foo'; expected wandb, tensorboard, trackio, json, noop or "
        "package.module.Class",
    ),
    ("trainer:\n  tracker: {mode: offlin}\n", "tracker.mode: expected 'online', 'offline' or 'disabled', not 'offlin'"),
    ("trainer:\n  seed: 4294967296\n", "c.yaml:2: trainer.seed: expected"),
    (
        "optimizer:\n  warmup: 0.6\n  decay: 0.6\n",
        "c.yaml:3: optimizer.decay: 240000 steps, with 240000 of warmup, are",
    ),
    ("optimizer:\n  cycles: 2\n  cycle_length: 5\n", "c.yaml:3: optimizer.cycle_length: set together with cycles"),
    ("optimizer:\n  cycles: [20, 10]\n", "c.yaml:2: optimizer.cycles: the steps where cycles end must increase"),
    ("trainer:\n  num_train_steps: 9\noptimizer:\n  warmup: 10\n", "c.yaml:4: optimizer.warmup: 10 steps are longer"),
    (
        "trainer:\n  initialize_from: a\ninitialize_from_hf: b\n",
        "c.yaml:3: initialize_from_hf: set together with trainer.initialize_from; remove one of them",
    ),
    (
        "trainer:\n  per_device_parallelism: 5\n",
        "c.yaml:2: trainer.per_device_parallelism: 5 does not divide trainer.train_batch_size 32",
    ),
    (
        "trainer:\n  fsdp_axis: embd\n",
        "c.yaml:2: trainer.fsdp_axis: unknown logical axis 'embd'; did you mean 'embed'?",
    ),
    (
        "trainer:\n  axis_resources: {mlp: modle}\n",
        "c.yaml:2: trainer.axis_resources: unknown mesh axis 'modle'; did you mean 'model'?",
    ),
    (
        "trainer:\n  load_checkpoint: false\n  load_checkpoint_path: a\n",
        "c.yaml:3: trainer.load_checkpoint_path: conflicts with load_checkpoint: false",
    ),
    (
        "trainer:\n  distributed:\n    process_id: 1\n",
        "c.yaml:3: trainer.distributed.process_id: requires num_processes",
    ),
    ("data:\n  name: x\n", "c.yaml:2: data.name: applies to a Hugging Face dataset, but no id is set"),
    ("data:\n  train_weights: {a: 1}\n", "c.yaml:2: data.train_weights: unknown source 'a'"),
    (
        "model:\n  type: llama\n  num_kv_heads: 5\n",
        "c.yaml:3: model.num_kv_heads: 5 does not divide num_heads 32; num_kv_heads could be 2 or 4",
    ),
    (
        "model:\n  type: llama\n  rope: {type: yarn}\n",
        "c.yaml:3: model.rope.original_seq_len: required by rope type yarn",
    ),
    ("model:\n  type: backpack\n  num_senses: 5\n", "c.yaml:3: model.num_senses: 5 does not divide hidden_dim 768"),
    ("model:\n  type: llama\n  mlp_scale: 4\n", "c.yaml:3: model.mlp_scale: no such setting"),
    (
        "trainer:\n  tracker: tensorboard\n",
        "c.yaml:2: trainer.tracker: expected a map with type: wandb, tensorboard, trackio, json, noop or "
        "package.module.Class, not 'tensorboard'",
    ),
    ("model: gpt2\n", "c.yaml:1: model: expected a map with type: gpt2, llama, mpt or backpack, not 'gpt2'"),
    ("trainer:\n  seed: null\n", "c.yaml:2: trainer.seed: expected a whole number, not null"),
    ("trainer:\n  seed: true\n", "c.yaml:2: trainer.seed: expected a number, not true or false"),
    ("trainer:\n  log_dir: ''\n", "c.yaml:2: trainer.log_dir: "),
    ("data:\n  cache_dir: ''\n", "c.yaml:2: data.cache_dir: "),
    ("trainer:\n  checkpointer:\n    base_path: ''\n", "c.yaml:3: trainer.checkpointer.base_path: "),
]


@pytest.mark.parametrize(("text", "expected"), BROKEN)
def test_an_invalid_config_is_reported_with_line_name_and_advice(folder, text, expected):
    first, *lines = report(folder, text)
    assert first.startswith("c.yaml: ")
    assert any(expected in line for line in lines), lines


def test_all_problems_are_reported_at_once_each_with_its_line(folder):
    assert report(folder, "model:\n  seq_len: x\n  num_heads: 0\ntrainer:\n  sed: 3\n") == [
        "c.yaml: 3 problems in the config",
        "  c.yaml:2: model.seq_len: expected a whole number, not 'x'",
        "  c.yaml:3: model.num_heads: expected greater than or equal to 1, not 0",
        "  c.yaml:5: trainer.sed: no such setting; did you mean trainer.seed?",
    ]


@pytest.mark.parametrize("text", ["optimizer:\n  warmup: '0.1'\n", "trainer:\n  fsdp_axis: 3\n"])
def test_one_mistake_is_one_problem_for_settings_with_several_types(folder, text):
    assert len(report(folder, text)) == 2


@pytest.mark.parametrize("text", ["model:\n", "model: gpt2\n", "model: [1]\n", "trainer:\n  tracker: json\n"])
def test_a_section_that_is_not_a_map_is_reported_in_terms_of_yaml(folder, text):
    message = "\n".join(report(folder, text))
    assert "map" in message
    assert "Config" not in message


def test_a_dotted_name_in_a_file_is_not_suggested_itself(folder):
    assert "did you mean trainer.seed?" not in report(folder, "trainer.seed: 3\n")[1]


def test_a_problem_in_an_included_file_has_its_line(folder):
    (folder / "m.yaml").write_text("num_layers: 2\nseq_len: x\n")
    assert report(folder, "model: !include m.yaml\n")[1].startswith("  m.yaml:2: model.seq_len: ")


def test_a_problem_in_an_override_has_its_flag(folder):
    lines = report(folder, "model:\n  seq_len: 32\n", [("model.seq_len", "x"), ("trainer.sed", "1")])
    assert lines[1].startswith("  --model.seq_len: model.seq_len: expected a whole number")
    assert lines[2] == "  --trainer.sed: no such setting; did you mean trainer.seed?"


def test_a_long_value_is_truncated(folder):
    assert len("\n".join(report(folder, f"model:\n  seq_len: {'x' * 5000}\n"))) < 1000


def test_overrides_win_over_the_file_and_the_file_over_defaults(folder):
    (folder / "c.yaml").write_text("model: {seq_len: 32, num_layers: 2}\n")
    model = load_config(RunConfig, "c.yaml", [("model.num_layers", "3")]).config.model
    assert (model.seq_len, model.num_layers, model.num_heads) == (32, 3, 12)


def test_an_empty_config_is_all_defaults(folder):
    (folder / "c.yaml").write_text("")
    assert load_config(RunConfig, "c.yaml").config == RunConfig()


@pytest.mark.parametrize("written", ["dir/c.yaml", "dir/c", "./dir/c"])
def test_a_config_is_found_with_or_without_its_extension(folder, written):
    (folder / "dir").mkdir()
    (folder / "dir" / "c.yaml").write_text("")
    assert load_config(RunConfig, written).stem == "c"
    assert find_config(written).endswith("dir/c.yaml")


def test_a_file_in_the_working_directory_wins_over_a_shipped_config(folder):
    assert find_config("gpt2_nano") != "gpt2_nano.yaml"
    (folder / "gpt2_nano.yaml").write_text("")
    assert find_config("gpt2_nano") == "gpt2_nano.yaml"


@pytest.mark.parametrize(("config", "stem"), [("memory://d/run.v2.yaml", "run.v2"), ("memory://d/x", "x")])
def test_a_url_is_taken_as_given(config, stem):
    import fsspec

    with fsspec.open(config, "w") as file:
        file.write("trainer: {seed: 3}\n")
    loaded = load_config(RunConfig, config)
    assert (loaded.config.trainer.seed, loaded.stem, loaded.path) == (3, stem, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gpt2_nan", "gpt2_nan: no such config; did you mean 'gpt2_nano'?"),
        ("gpt2_nan.yaml", "gpt2_nan.yaml: no such config; did you mean 'gpt2_nano'?"),
        ("zzz", "zzz: no such config; give a path, or one of: backpack_nano, "),
        ("", ": no such config; give a path, or one of: "),
        (".", ".: no such config; give a path, or one of: "),
    ],
)
def test_a_missing_config(folder, config, message):
    with pytest.raises(UserError) as caught:
        find_config(config)
    assert str(caught.value).startswith(message)


def test_another_type_on_the_command_line_drops_settings_that_it_does_not_have(folder):
    (folder / "c.yaml").write_text(
        "trainer:\n  tracker:\n    project: p\noptimizer:\n  learning_rate: 2E-4\n  nesterov: true\n"
        "model:\n  num_layers: 3\n  mlp_scale: 2\n"
    )
    flags = [("trainer.tracker", "{type: json}"), ("optimizer.type", "sophia-h"), ("model.type", "llama")]
    loaded = load_config(RunConfig, "c.yaml", flags)
    config = loaded.config
    assert [tracker.type for tracker in config.trainer.tracker] == ["json"]
    assert (config.optimizer.type, config.optimizer.learning_rate) == ("sophia-h", 2e-4)
    assert (config.model.type, config.model.num_layers) == ("llama", 3)
    assert loaded.layer.notices == [
        "--trainer.tracker: ignoring trainer.tracker.project (c.yaml:3): json has no such setting",
        "--optimizer.type: ignoring optimizer.nesterov (c.yaml:6): sophia-h has no such setting",
        "--model.type: ignoring model.mlp_scale (c.yaml:9): llama has no such setting",
    ]


def test_the_same_type_on_the_command_line_drops_nothing(folder):
    assert "no such setting" in report(folder, "model: {num_layer: 2}\n", [("model.type", "gpt2")])[1]
