"""A small Llama to start from, and runs that continue from a checkpoint of another one."""

import shutil
from pathlib import Path

import pytest
import yaml
from conftest import logged, run_in_process
from faults.runs import array_bytes, run_folder


def copy_of_base(tiny_llama: Path, factory: pytest.TempPathFactory, name: str) -> Path:
    """A new folder with the run `base`, its export and its cache, for a module to change."""
    return Path(shutil.copytree(tiny_llama, factory.mktemp(name) / "with base"))


def write(folder: Path, name: str, settings: dict) -> None:
    """Write `<name>.yaml`."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))


def continued(folder: Path, config: str, run: str, *flags: object, step: int = 4, code: int = 0) -> str:
    """Train the run `<run>-again` from a copy of the checkpoint `step` of the run `run`. -> the output"""
    again = run_folder(folder, f"{run}-again")
    shutil.rmtree(again, ignore_errors=True)
    shutil.copytree(run_folder(folder, run) / f"step-{step}", again / f"step-{step}")
    output = run_in_process(["train", config, "--trainer.id", again.name, *flags], folder, code).stderr
    assert code or f"resuming after step {step}" in output
    return output


def assert_resumes_with_the_same_bits(folder: Path, config: str, run: str, last: int = 8) -> str:
    """Check that the run `run`, resumed from its checkpoint of step 4, is the straight run. -> the output"""
    output = continued(folder, config, run)
    assert array_bytes(folder, last, f"{run}-again") == array_bytes(folder, last, run)
    losses = logged(folder, "train/loss", run)
    assert logged(folder, "train/loss", f"{run}-again") == {step: losses[step] for step in range(5, last + 1)}
    return output
