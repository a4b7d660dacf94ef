"""A small Llama, trained and exported from the command line, for tests of what starts from a model."""

from pathlib import Path

import yaml
from conftest import run_in_process, tiny_settings

SIZES = {"hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}


def write(folder: Path, name: str, settings: dict) -> None:
    """Write `<name>.yaml`."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))


def train_and_export(folder: Path, name: str, seq_len: int, **trainer: object) -> None:
    """Train the run `name` by `<name>.yaml`, and export it to the folder `name`."""
    settings = tiny_settings()
    settings["model"] = {"type": "llama", **SIZES, "seq_len": seq_len}
    settings["trainer"] |= {"id": name, **trainer}
    write(folder, name, settings)
    run_in_process(["train", f"{name}.yaml"], folder, code=0)
    run_in_process(["export-hf", f"{name}.yaml", "--output", name], folder, code=0)
