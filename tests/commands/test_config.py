"""`config check` validates a config; `config show` prints a config with the same run id."""

import json
import os

import pytest
import yaml

from lmtrain.commands import config
from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig
from lmtrain.run.run import run_id
from lmtrain.runtime.errors import UserError


@pytest.fixture(autouse=True)
def _folder(settings, write_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(settings)


def test_check_names_the_file_and_the_run_and_writes_nothing(capsys):
    assert config.run(["check", "tiny.yaml", "--trainer.id", "mine"]) == 0
    assert capsys.readouterr().out == "tiny.yaml: ok, run id mine\n"
    assert os.listdir() == ["tiny.yaml"]


def test_check_notes_settings_without_effect_and_refuses_what_a_start_would(settings, write_config, capsys):
    line = write_config(settings | {"hf_save_steps": 5}).read_text().splitlines().index("hf_save_steps: 5") + 1
    assert config.run(["check", "tiny.yaml"]) == 0
    assert capsys.readouterr().err.startswith(f"note: tiny.yaml:{line}: hf_save_steps: ")
    with pytest.raises(UserError, match=r"^trainer\.early_stopping: "):
        config.run(["check", "tiny.yaml", "--trainer.early_stopping", "{}", "--data.validation_urls", "null"])
    with pytest.raises(UserError, match=r"trainer\.sample_length: "):
        config.run(["check", "tiny.yaml", "--trainer.sample_prompts", "[a]", "--trainer.sample_length", "9999"])


def test_check_refuses_to_export_what_transformers_does_not_have(settings, write_config):
    model = {"type": "llama", "hidden_dim": 16, "num_heads": 2, "num_layers": 2, "attention_sinks": True}
    write_config(settings | {"model": model})
    assert config.run(["check", "tiny.yaml"]) == 0
    with pytest.raises(UserError, match="attention_sinks"):
        config.run(["check", "tiny.yaml", "--hf_save_path", "exports", "--hf_save_steps", "2"])
    assert os.listdir() == ["tiny.yaml"]


def test_show_prints_the_origin_of_each_value(capsys):
    config.run(["show", "tiny.yaml", "--model.num_layers", "3", "--trainer.checkpointer.save_interval", "90m"])
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["trainer"]["checkpointer"]["save_interval"] == "1h30m"
    assert yaml.safe_load(out).keys() == RunConfig.model_fields.keys()
    lines = [line.split() for line in out.splitlines()]
    assert ["num_layers:", "3", "#", "--model.num_layers"] in lines
    assert ["mlp_scale:", "4", "#", "default"] in lines
    assert any(line[:2] == ["hidden_dim:", "32"] and line[3].startswith("tiny.yaml:") for line in lines)


@pytest.mark.parametrize(
    "argv",
    [
        ["tiny.yaml", "--data.cache_dir", "çache ü", "--trainer.tracker", "[{type: wandb, tags: [a]}, {type: noop}]"],
        ["tiny.yaml", "--trainer.checkpointer.keep", "[{every: 2, until: 4}, {every: 8}]", "--optimizer.decay", "0.25"],
        ["gpt2_nano"],
    ],
)
def test_the_shown_config_loads_as_the_same_run(argv, capsys, tmp_path):
    config.run(["show", *argv])
    (tmp_path / "shown.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    shown = load_config(RunConfig, "shown.yaml")
    overrides = [(name.removeprefix("--"), value) for name, value in zip(argv[1::2], argv[2::2], strict=True)]
    original = load_config(RunConfig, argv[0], overrides)
    assert shown.config == original.config
    assert run_id(shown.config, "x", {}) == run_id(original.config, "x", {})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["chek", "tiny.yaml"], "check, show"),
        (["show", "gone.yaml"], "gone.yaml: "),
        (["check", "tiny.yaml", "--trainer.fsdp_axis", "embd"], "logical axis 'embd'"),
    ],
)
def test_a_wrong_command_line_is_a_user_error(argv, message):
    with pytest.raises(UserError) as caught:
        config.run(argv)
    assert message in str(caught.value)


def test_the_learning_rate_is_plotted(settings, write_config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings["optimizer"] |= {"cycles": 2, "warmup": 3}
    write_config(settings)
    assert config.run(["show", "tiny.yaml", "--plot-lr", "rate.png"]) == 0
    assert capsys.readouterr().out == "wrote rate.png\n"
    with open("rate.png", "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    for path in ("nowhere/rate.png", "rate.nonsense"):
        with pytest.raises(UserError, match="--plot-lr"):
            config.run(["show", "tiny.yaml", "--plot-lr", path])


def test_show_resolved_has_the_steps_that_the_data_gives_once_it_is_tokenized(run_cli):
    def shown(*flags):
        done = run_cli("config", "show", "tiny.yaml", "--epoch", "1", *flags)
        assert done.returncode == 0, done.stderr
        (line,) = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("num_train_steps:")]
        return int(line[1]), " ".join(line[3:]), done.stderr

    more = ["--trainer.num_train_steps", "100000"]
    assert shown(*more)[:2] == (100000, "--trainer.num_train_steps")
    steps, _, printed = shown("--resolved", *more)
    assert (steps, "it is not tokenized yet" in printed) == (100000, True)
    assert run_cli("preprocess", "tiny.yaml").returncode == 0
    steps, place, printed = shown("--resolved", *more)
    assert 0 < steps < 100000
    assert place == f"epoch 1 ({steps:,} steps)"
    assert "note" not in printed


def test_show_resolved_has_the_replicas_that_these_devices_get(run_cli, tmp_path):
    settings = {"data": {"tokenizer": "passthrough", "vocab_size": 64, "enforce_eos": False}}
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(settings))
    done = run_cli("config", "show", "bare.yaml", "--resolved")
    (line,) = [line for line in done.stdout.splitlines() if "replica_dcn_axis_size" in line]
    assert line.split() == ["replica_dcn_axis_size:", "1", "#", "auto:", "one", "slice", "or", "host"]
    other = run_cli("config", "show", "bare.yaml", "--resolved", "--trainer.model_axis_size", "3")
    assert other.returncode == 0
    assert "note: replica_dcn_axis_size " in other.stderr
    assert "replica_dcn_axis_size: auto " in other.stdout


def test_show_resolved_has_the_sizes_of_the_initial_model(run_cli, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 24, "n_layer": 3, "n_head": 2}))
    begins = ["--initialize_from_hf", "base", "--use_hf_model_config", "true", "--model", "{}"]
    (tmp_path / "bare.yaml").write_text("data: {train_urls: [a.jsonl], tokenizer: byte}\n")
    written = run_cli("config", "show", "bare.yaml", *begins)
    resolved = run_cli("config", "show", "bare.yaml", *begins, "--resolved")
    assert (written.returncode, resolved.returncode) == (0, 0), resolved.stderr
    assert yaml.safe_load(written.stdout)["model"]["num_layers"] == 12
    assert yaml.safe_load(resolved.stdout)["model"]["num_layers"] == 3
    (line,) = [line for line in resolved.stdout.splitlines() if "num_layers" in line]
    assert line.partition("# ")[2] == "base: its config.json"
