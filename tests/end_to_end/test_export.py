"""`export-hf` and `generate` on a trained checkpoint. tests/parity compares the values with transformers."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import run_in_process, tiny_settings
from safetensors.numpy import load_file

from lmtrain.checkpoint.manifest import read_manifest, write_manifest
from lmtrain.config.load import load_config
from lmtrain.hf.find_tokenizer import find_tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.run import run_id

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def trained(tiny_run, tmp_path_factory):
    """A folder with tiny.json, its run `one` of 12 steps, and its export."""
    folder = shutil.copytree(tiny_run, tmp_path_factory.mktemp("trained") / "copy")
    settings = tiny_settings()
    settings["trainer"]["id"] = "one"
    (folder / "tiny.json").write_text(json.dumps(settings))
    run(folder, "export-hf", "tiny.json", "--output", "model")
    return folder


def run(folder, *arguments: object) -> str:
    return run_in_process(arguments, folder, code=0).stdout


def test_an_average_is_the_mean_of_the_checkpoints(trained):
    steps = {}
    for step in (4, 8, 12):
        run(trained, "export-hf", "tiny.json", "--checkpoint", f"checkpoints/one/step-{step}", "--output", step)
        steps[step] = load_file(trained / str(step) / "model.safetensors")
    run(trained, "export-hf", "tiny.json", "--average", "3", "--output", "averaged")
    averaged = load_file(trained / "averaged" / "model.safetensors")
    for name, values in averaged.items():
        total = sum((steps[step][name].astype(np.float64) for step in steps), start=0.0)
        np.testing.assert_allclose(values, total / 3, rtol=1e-6, atol=1e-9)
    assert any((averaged[name] != steps[12][name]).any() for name in averaged)
    last = json.loads(run(trained, "eval", "tiny.json"))
    listed = json.loads(run(trained, "eval", "tiny.json", "--average", "4, 12"))
    assert listed["step"] == last["step"] == 12
    assert listed["eval/loss"] != last["eval/loss"]


def test_what_cannot_be_averaged_is_named(trained):
    for average, named in (
        ("5", "3 permanent checkpoints (steps: 4, 8, 12)"),
        ("1", "--average 1: "),
        ("4,4", "--average 4,4: "),
        ("4,5", "step-5: "),
    ):
        refused = run_in_process(["eval", "tiny.json", "--average", average], trained, code=2)
        assert named in refused.stderr.splitlines()[-1]


def test_the_export_of_another_run_is_replaced_only_with_overwrite(trained):
    config = trained / "model" / "config.json"
    assert json.loads(config.read_text())["lmtrain_run"] == "one"
    run(trained, "export-hf", "tiny.json", "--output", "model")  # the same command again
    mine = config.read_text()
    data = json.loads(mine)["lmtrain_data"]
    command = ["export-hf", "tiny.json", "--output", "model"]
    # another run, and one of the same id in another project
    for ours, others, expected in (
        ("one", "another", "this one is of one"),
        (data, "0" * 16, "on other data"),
    ):
        config.write_text(mine.replace(f'"{ours}"', f'"{others}"'))
        refused = run_in_process(command, trained, code=2)
        assert expected in refused.stderr.splitlines()[-1]
        assert others in config.read_text()
    config.write_text(mine.replace(f'"lmtrain_data": "{data}",', ""))  # as in exports of versions without this entry
    run(trained, "export-hf", "tiny.json", "--output", "model")
    config.write_text(mine.replace('"one"', '"another"'))
    run(trained, "export-hf", "tiny.json", "--output", "model", "--overwrite")
    assert config.read_text() == mine


def test_a_run_keeps_its_tokenizer(trained, tmp_path):
    """A checkpoint of a run whose tokenizer was trained again is used with the copy in the run's folder."""
    folder = tmp_path / "moved"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("cache", "model"))
    settings = json.loads((folder / "tiny.json").read_text())
    settings["data"]["tokenizer"] = "tok"
    (folder / "tiny.json").write_text(json.dumps(settings))
    shutil.copytree(find_tokenizer("byte"), folder / "tok")
    command = ["export-hf", "tiny.json", "--output", "again"]
    assert "using the copy in logs/one/tokenizer" in run_in_process(command, folder, code=0).stderr
    for name in os.listdir(trained / "model"):
        assert (folder / "again" / name).read_bytes() == (trained / "model" / name).read_bytes(), name
    shutil.rmtree(folder / "logs" / "one" / "tokenizer")
    refused = run_in_process(command, folder, code=2)
    assert "tokenizer" in refused.stderr


def test_the_checkpoint_in_use_and_newer_runs_of_the_same_config_are_logged(trained, tmp_path):
    """The newer run was started from the same file, with other settings on the command line."""
    folder = tmp_path / "runs"
    folder.mkdir()
    settings = json.loads((trained / "tiny.json").read_text())
    del settings["trainer"]["id"]
    (folder / "tiny.json").write_text(json.dumps(settings))
    own = run_id(load_config(RunConfig, str(folder / "tiny.json")).config, "tiny", {})

    def add(name, later):
        shutil.copytree(trained / "checkpoints" / "one", folder / "checkpoints" / name)
        for path in (folder / "checkpoints" / name).glob("step-*"):
            manifest = read_manifest(str(path))
            write_manifest(str(path), replace(manifest, saved=manifest.saved + later))

    def export(*arguments, code=0):
        sizes_only = ["--trainer.checkpointer.verify_on_restore", "sizes"]
        return run_in_process(["export-hf", *arguments, *sizes_only], folder, code).stderr

    add("tiny-ffffff", later=100)
    add("other-ffffff", later=100)
    output = export("tiny.json", "--output", "one", code=2)
    assert "tiny-ffffff (step 12)" in output
    add(own, later=0)
    output = export("tiny.json", "--output", "one")
    assert f"step 12: checkpoints/{own}/step-12" in output
    assert "tiny-ffffff (step 12)" in output
    assert "other-ffffff" not in output

    kept = folder / "logs" / "tiny-ffffff"
    shutil.copytree(trained / "logs" / "one", kept)
    output = export("--run", "tiny-ffffff", "--output", "two")
    assert "/checkpoints/one/step-12" not in output
    assert (folder / "two" / "model.safetensors").read_bytes() == (trained / "model" / "model.safetensors").read_bytes()
    assert "tiny-ffffff" in export("--run", "tiny-fffffe", "--output", "three", code=2)
    assert "has its own config" in export("tiny.json", "--run", "tiny-ffffff", "--output", "three", code=2)


@pytest.mark.long
def test_the_checkpoint_flag_selects_the_checkpoint(trained):
    prompt = ["generate", "tiny.json", "--prompt", "The", "--max_new_tokens", "20", "--checkpoint"]
    run_folder = trained / "checkpoints" / "one"
    assert run(trained, *prompt, str(run_folder)) == run(trained, *prompt, str(run_folder / "step-12"))
    assert run(trained, *prompt, str(run_folder / "step-4")) != run(trained, *prompt, str(run_folder / "step-12"))


@pytest.mark.long
def test_generate_continues_the_prompt_and_is_deterministic(trained):
    prompt = ["generate", "tiny.json", "--prompt", "The quiet river", "--max_new_tokens", "12"]
    first = run(trained, *prompt)
    assert first.startswith("The quiet river")
    assert len(first) > len("The quiet river\n")
    assert run(trained, *prompt) == first
    assert run(trained, *prompt, "--seed", "1") != first
    (trained / "prompts.txt").write_text("The quiet river\nA\n")
    found = run(
        trained, "generate", "tiny.json", "--prompts", "prompts.txt", "--samples", "10", "--max_new_tokens", "12"
    )
    texts = [json.loads(line) for line in found.splitlines()]
    assert [(text["prompt"], text["sample"]) for text in texts[9:11]] == [("The quiet river", 9), ("A", 0)]
    assert len({text["text"] for text in texts[:10]}) > 1
