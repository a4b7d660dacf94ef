"""YAML files and commands of the reference's users work: the YAML loads unchanged, the commands parse."""

import re
import shlex
from pathlib import Path

import pytest

from lmtrain.commands.arguments import Parser, add_model_flags, parse_run
from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError

BLOCKS = Path(__file__).with_name("blocks.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", BLOCKS, re.DOTALL)
COMMANDS = [
    command
    for block in re.findall(r"```bash\n(.*?)```", BLOCKS, re.DOTALL)
    for command in block.replace("\\\n", " ").splitlines()
    if command.startswith("python ")
]
VERBS = {
    "gpt2_example.py": "train",
    "train_lm": "train",
    "cache_dataset": "preprocess",
    "eval_lm": "eval",
    "export_to_hf": "export-hf",
}


def test_the_copy_is_complete():
    assert (len(YAML), len(COMMANDS)) == (16, 17)


def write(folder, block):
    """The block as main.yaml; a block of several files is split at their names; parts get their section."""
    parts = re.split(r"^# ([\w-]+\.yaml)\n", block, flags=re.MULTILINE)
    files = dict(zip(parts[1::2], parts[2::2], strict=True)) or {"main.yaml": block}
    for name, text in files.items():
        if text.startswith("checkpointer:"):
            text = "trainer:\n" + re.sub(r"^", "  ", text, flags=re.MULTILINE)
        (folder / name).write_text(text)
    return next(iter(files))


@pytest.mark.parametrize("block", YAML)
def test_every_config_loads_unchanged(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_config(RunConfig, write(tmp_path, block))
    assert loaded.config != RunConfig() or "type: wandb" not in block
    old = [name for name in ("gpt2:\n", "  wandb:\n") if name in block]
    assert len(loaded.tree.notices) == len(old)


def test_the_long_example_has_the_expected_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in YAML if "hf_save_steps" in block]
    config = load_config(RunConfig, write(tmp_path, block)).config
    assert config.data.urls("train") == ["gs://path/to/train.{1..32}.jsonl.gz"]
    assert (config.model.type, config.model.hidden_dim, config.model.num_layers) == ("gpt2", 1536, 48)
    assert [(tracker.type, tracker.project, tracker.tags) for tracker in config.trainer.tracker] == [
        ("wandb", "levanter", ["gpt2"])
    ]
    assert (config.trainer.per_device_parallelism, config.trainer.per_device_eval_parallelism) == (-1, 8)
    assert config.trainer.checkpointer.save_interval.total_seconds() == 900
    assert (config.optimizer.learning_rate, config.hf_save_steps) == (1e-4, 10_000)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_line_parses(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_config.yaml").write_text("data: {train_urls: [a.jsonl]}\n")
    program, *arguments = shlex.split(command.removeprefix("python ").removeprefix("-m "))
    verb = VERBS[Path(program).name if program.endswith(".py") else program.rsplit(".", 1)[-1]]
    # a local config instead of the URL
    arguments = [argument.replace("gs://path/to/config.yaml", "my_config.yaml") for argument in arguments]
    parser = Parser(verb, "")
    if verb in ("eval", "export-hf"):
        add_model_flags(parser)
    if verb == "export-hf":
        parser.add_argument("--output", "--output_dir")
    if "--trainer.wandb,group" in arguments:
        with pytest.raises(UserError, match=r"wandb,group: no such setting; did you mean --trainer\.wandb\.group\?"):
            parse_run(parser, arguments)
        return
    parsed, run = parse_run(parser, arguments)
    config = run.config
    expected = {
        "--data.id": lambda value: config.data.id == value and config.data.train_urls is None,
        "--data.train_urls": lambda value: config.data.urls("train") == ["https://path/to/train/data_*.jsonl.gz"],
        "--data.tokenizer": lambda value: config.data.tokenizer == value,
        "--model.num_heads": lambda value: config.model.num_heads == 20,
        "--trainer.num_train_steps": lambda value: config.trainer.num_train_steps == 10_000,
        "--trainer.batch_size": lambda value: config.trainer.train_batch_size == 256,
        "--trainer.eval_per_device_parallelism": lambda value: config.trainer.per_device_eval_parallelism == 64,
        "--trainer.checkpointer.save_interval": lambda value: config.trainer.checkpointer.save_interval.seconds == 1200,
        "--trainer.wandb.id": lambda value: run.id == value and config.trainer.tracker[0].id == value,
        "--trainer.wandb.resume": lambda value: config.trainer.tracker[0].resume is True,
        "--trainer.load_checkpoint_path": lambda value: config.trainer.load_checkpoint_path == value,
        "--address": lambda value: config.trainer.ray.address == value,
        "--start_workers": lambda value: config.trainer.ray.start_workers is False,
        "--auto_start_cluster": lambda value: config.trainer.ray.auto_start_cluster is False,
        "--checkpoint_path": lambda value: parsed.checkpoint == value,
        "--output_dir": lambda value: parsed.output == value,
    }
    for flag, value in zip(arguments[::2], arguments[1::2], strict=True):
        assert expected.get(flag, lambda value: True)(value), flag
