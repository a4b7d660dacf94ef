"""`export-hf` and `generate` on a trained checkpoint. tests/parity compares the values with transformers."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import yaml
from conftest import run_in_process, tiny_settings
from transformers import AutoTokenizer

from lmtrain.checkpoint.manifest import read_manifest, write_manifest
from lmtrain.config.load import load_config
from lmtrain.hf.find_tokenizer import find_tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.identity import run_id

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with tiny.yaml, trained for 8 steps, and its export."""
    folder = tmp_path_factory.mktemp("trained")
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 8, "id": "exported"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    run(folder, "train", "tiny.yaml")
    run(folder, "export-hf", "tiny.yaml", "--output", "model")
    return folder


def run(folder, *arguments: str) -> str:
    return run_in_process(arguments, folder, code=0).stdout


def test_the_export_contains_the_tokenizer(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    text = "The quiet café counts the naïve-robot.\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, len(tokenizer), tokenizer.model_max_length) == (0, 384, 32)


def test_the_files_of_an_export_have_the_permissions_of_the_umask(trained):
    umask = os.umask(0)
    os.umask(umask)
    for name in os.listdir(trained / "model"):
        assert os.stat(trained / "model" / name).st_mode & 0o777 == 0o666 & ~umask, name


def test_the_export_of_another_run_is_replaced_only_with_overwrite(trained):
    config = trained / "model" / "config.json"
    assert json.loads(config.read_text())["lmtrain_run"] == "exported"
    run(trained, "export-hf", "tiny.yaml", "--output", "model")  # the same command again
    mine = config.read_text()
    data = json.loads(mine)["lmtrain_data"]
    command = ["export-hf", "tiny.yaml", "--output", "model"]
    # another run, and one of the same id in another project
    for ours, others, expected in (
        ("exported", "another", "this one is of exported"),
        (data, "0" * 16, "exported on other data"),
    ):
        config.write_text(mine.replace(f'"{ours}"', f'"{others}"'))
        refused = run_in_process(command, trained, code=2)
        for part in ("--output model", expected, "--overwrite"):
            assert part in refused.stderr.splitlines()[-1]
        assert others in config.read_text()
    config.write_text(mine.replace(f'"lmtrain_data": "{data}",', ""))  # as in exports of versions without this entry
    run(trained, "export-hf", "tiny.yaml", "--output", "model")
    config.write_text(mine.replace('"exported"', '"another"'))
    run(trained, "export-hf", "tiny.yaml", "--output", "model", "--overwrite")
    assert config.read_text() == mine


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_run_keeps_its_tokenizer(trained, tmp_path, change):
    """A checkpoint of a run whose tokenizer was deleted or trained again is used with the copy in the run's folder."""
    folder = tmp_path / "moved"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("cache", "model"))
    settings = yaml.safe_load((folder / "tiny.yaml").read_text())
    settings["data"]["tokenizer"] = "tok"
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    if change == "replaced":
        shutil.copytree(find_tokenizer("byte"), folder / "tok")
    command = ["export-hf", "tiny.yaml", "--output", "again"]
    assert "using the copy in logs/exported/tokenizer" in run_in_process(command, folder, code=0).stderr
    for name in os.listdir(trained / "model"):
        assert (folder / "again" / name).read_bytes() == (trained / "model" / name).read_bytes(), name
    shutil.rmtree(folder / "logs" / "exported" / "tokenizer")
    refused = run_in_process(command, folder, code=2)
    assert ("tokenizer" in refused.stderr.splitlines()[-1]) or "tokenizer.fingerprint" in refused.stderr


def test_the_checkpoint_in_use_and_newer_runs_of_the_same_config_are_logged(trained, tmp_path):
    """The newer run was started from the same file, with other settings on the command line."""
    folder = tmp_path / "runs"
    folder.mkdir()
    settings = yaml.safe_load((trained / "tiny.yaml").read_text())
    del settings["trainer"]["id"]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    own = run_id(load_config(RunConfig, str(folder / "tiny.yaml")).config, "tiny", {})

    def add(name, later):
        shutil.copytree(trained / "checkpoints" / "exported", folder / "checkpoints" / name)
        for path in (folder / "checkpoints" / name).glob("step-*"):
            manifest = read_manifest(str(path))
            write_manifest(str(path), replace(manifest, saved=manifest.saved + later))

    def export(*arguments, code=0):
        sizes_only = ["--trainer.checkpointer.verify_on_restore", "sizes"]
        return run_in_process(["export-hf", *arguments, *sizes_only], folder, code).stderr

    add("tiny-ffffff", later=100)
    add("other-ffffff", later=100)
    output = export("tiny.yaml", "--output", "one", code=2)
    assert "other runs of tiny.yaml: tiny-ffffff (step 8); add --run ID" in output
    add(own, later=0)
    output = export("tiny.yaml", "--output", "one")
    assert f"step 8: checkpoints/{own}/step-8" in output
    assert "tiny-ffffff (step 8)" in output
    assert "other-ffffff" not in output

    kept = folder / "logs" / "tiny-ffffff"
    shutil.copytree(trained / "logs" / "exported", kept)
    output = export("--run", "tiny-ffffff", "--output", "two")
    assert "/checkpoints/exported/step-8" not in output
    assert (folder / "two" / "model.safetensors").read_bytes() == (trained / "model" / "model.safetensors").read_bytes()
    assert "did you mean tiny-ffffff?" in export("--run", "tiny-fffffe", "--output", "three", code=2)
    assert "has its own config" in export("tiny.yaml", "--run", "tiny-ffffff", "--output", "three", code=2)


@pytest.mark.long
def test_the_checkpoint_flag_selects_the_checkpoint(trained):
    prompt = ["generate", "tiny.yaml", "--prompt", "The", "--max_new_tokens", "20", "--checkpoint"]
    run_folder = trained / "checkpoints" / "exported"
    assert run(trained, *prompt, str(run_folder)) == run(trained, *prompt, str(run_folder / "step-8"))
    assert run(trained, *prompt, str(run_folder / "step-4")) != run(trained, *prompt, str(run_folder / "step-8"))


@pytest.mark.long
def test_generate_continues_the_prompt_and_is_deterministic(trained):
    prompt = ["generate", "tiny.yaml", "--prompt", "The quiet river", "--max_new_tokens", "12"]
    first = run(trained, *prompt)
    assert first.startswith("The quiet river")
    assert len(first) > len("The quiet river\n")
    assert run(trained, *prompt) == first
    assert run(trained, *prompt, "--seed", "1") != first
