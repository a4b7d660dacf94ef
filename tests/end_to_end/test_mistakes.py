"""User errors: one clear message, exit code 2, no traceback, no partially written files."""

import json
import os

import pytest

pytestmark = pytest.mark.end_to_end


def change(settings: dict, path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[name] = value


def write_lines(tmp_path, *lines: str) -> str:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("data.train_urls", ["absent.jsonl"], ["no such file", "absent.jsonl"]),
        ("data.train_urls", ["nothing/*.jsonl"], ["no such file", "nothing/*.jsonl"]),
        ("data.train_urls", ["part.{1..3.jsonl"], ["unbalanced braces"]),
        ("data.train_urls", ["text.docx"], ["no such file", "text.docx"]),
        ("data.train_urls", ["."], [".: is a folder; set the files in it, such as './*.jsonl'"]),
        ("data.cache_dir", "tiny.yaml", ["data.cache_dir: tiny.yaml/train cannot be created: "]),
        ("batch_size", 4, ["tiny.yaml:", "no such setting; did you mean trainer.train_batch_size?"]),
        ("trainer.train_batch_size", 50_000, ["train_batch_size: 50,000 sequences of 32 tokens, but", "at most"]),
        ("data.tokenizer", "no/such/folder", ["no such folder", "lmtrain tokenizer train"]),
        ("data.train_urls", None, ["data.train_urls", "no text for training"]),
        ("model.num_headz", 3, ["tiny.yaml:", "model.num_headz: no such setting; did you mean model.num_heads?"]),
        ("modle.num_heads", 3, ["tiny.yaml:", "no such setting; did you mean model"]),
        ("model.num_heads", 5, ["tiny.yaml:", "5 does not divide hidden_dim 32; num_heads could be 2 or 4"]),
        ("trainer.train_batch_size", 0, ["tiny.yaml:", "trainer.train_batch_size: expected greater than"]),
        (
            "trainer.per_device_parallelism",
            3,
            ["tiny.yaml:", "3 does not divide trainer.train_batch_size 4; it could be 2 or 4"],
        ),
        ("trainer.model_axis_size", 2, ["trainer.model_axis_size", "1 devices do not divide by 2"]),
        ("trainer.checkpointer.save_interval", 15, ["tiny.yaml:", "for example 15m"]),
        ("trainer.mp", "f16", ["tiny.yaml:", "float16 needs loss scaling"]),
        ("model.seq_len", 100_000, ["less than one sequence"]),
        ("trainer.id", "../x", ["run id '../x'", "trainer.id"]),
    ],
)
def test_a_wrong_setting(run_cli, settings, write_config, tmp_path, path, value, expected):
    change(settings, path, value)
    write_config(settings)
    done = run_cli("train", "tiny.yaml")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for part in expected:
        assert part in done.stderr
    assert not (tmp_path / "checkpoints").exists()
    written = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not [name for name in written if ".tmp" in name]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{broken", "text.jsonl:3: not JSON"),
        ('{"txt": "a"}', "text.jsonl:3: no key 'text' (it has 'txt'); set data.text_key"),
        ('{"text": 3}', "text.jsonl:3: 'text' is int, not text"),
        ('["text"]', "text.jsonl:3: expected a JSON object"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_place_and_leaves_no_cache(
    run_cli, settings, write_config, tmp_path, line, expected
):
    good = json.dumps({"text": "a line that is valid " * 20})
    settings["data"]["train_urls"] = [write_lines(tmp_path, good, good, line, good)]
    write_config(settings)
    done = run_cli("preprocess", "tiny.yaml")
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cache" / "train" / "manifest.json").exists()
    settings["data"]["train_urls"] = [write_lines(tmp_path, good, good, good)]
    write_config(settings)
    assert run_cli("preprocess", "tiny.yaml").returncode == 0
    assert sorted(os.listdir(tmp_path / "cache" / "train")) == [
        "manifest.json",
        "shard-00000-of-00001.arrayrecord",
        "shard-00000-of-00001.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "CONFIG"),
        (["train", "absent.yaml"], "absent.yaml: no such config"),
        (["train", "gpt2_nan"], "did you mean 'gpt2_nano'?"),
        (["trian", "tiny.yaml"], "'trian'; did you mean 'train'?"),
        (["train", "tiny.yaml", "--trainer.sed", "1"], "did you mean trainer.seed?"),
        (["train", "tiny.yaml", "--trainer.seed"], "--trainer.seed needs a value"),
        (["train", "tiny.yaml", "extra"], "unrecognized arguments: extra"),
        (["generate", "tiny.yaml"], "--prompt"),
        (["generate", "tiny.yaml", "--prompt", "a"], "no such folder; `lmtrain train` saves them"),
        (["generate", "tiny.yaml", "--prompt", "a", "--max_new_tokens", "many"], "invalid int value: 'many'"),
        (["export-hf", "tiny.yaml"], "--output"),
        (["export-hf", "tiny.yaml", "--output", "x", "--dtype", "f8"], "invalid choice: 'f8'"),
        (["export-hf", "tiny.yaml", "--output", "x", "--checkpoint", "gone"], "checkpoint gone: no such folder"),
        (["tokenizer", "train", "absent.jsonl", "--output", "x"], "no such file: absent.jsonl"),
        (["config", "chek", "tiny.yaml"], "expected one of: check, show"),
    ],
)
def test_a_wrong_command_line(run_cli, settings, write_config, tmp_path, arguments, expected):
    write_config(settings)
    done = run_cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["tiny.yaml"]


def test_an_unavailable_platform_is_an_error(lmtrain, settings, write_config, tmp_path, monkeypatch):
    write_config(settings)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    done = lmtrain("train", "tiny.yaml")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lmtrain: error: JAX_PLATFORMS=cuda: JAX cannot use this platform: ")
    assert "`lmtrain doctor`" in last
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("name", ["steps_per_eval", pytest.param("validation_urls", marks=pytest.mark.long)])
def test_a_run_without_evaluation_is_valid(run_cli, settings, write_config, tmp_path, name):
    """An existing validation cache is ignored."""
    settings["trainer"] |= {"num_train_steps": 1, "id": "one"}
    settings["optimizer"]["warmup"] = 0
    write_config(settings)
    assert run_cli("preprocess", "tiny.yaml").returncode == 0
    settings["trainer" if name == "steps_per_eval" else "data"][name] = None
    write_config(settings)
    done = run_cli("train", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "logs" / "one.metrics.jsonl").read_text()
    assert "train/loss" in lines
    assert "eval/loss" not in lines


def test_saving_xla_dumps_without_a_dump_folder_is_an_error_before_anything_is_saved(
    run_cli, settings, write_config, tmp_path
):
    settings["trainer"]["tracker"] = {"type": "wandb", "mode": "disabled", "save_xla_dumps": True}
    write_config(settings)
    done = run_cli("train", "tiny.yaml")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lmtrain: error: trainer.tracker.save_xla_dumps: ")
    assert "XLA_FLAGS=--xla_dump_to=FOLDER" in last
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "wandb").exists()
