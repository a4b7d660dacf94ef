"""From a trained checkpoint to a folder for others, and to a line of text. The numbers are in tests/parity."""

import os
import subprocess
import sys

import pytest
import yaml
from conftest import tiny_settings
from transformers import AutoTokenizer

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
    command = [sys.executable, "-m", "lmtrain", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tokenizer_travels_with_the_model(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    text = "The quiet café counts the naïve-robot.\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (0, 384)


def test_an_export_is_readable_by_others_as_files_usually_are(trained):
    umask = os.umask(0)
    os.umask(umask)
    for name in os.listdir(trained / "model"):
        assert os.stat(trained / "model" / name).st_mode & 0o777 == 0o666 & ~umask, name


@pytest.mark.long
def test_generate_continues_the_prompt_and_repeats_itself(trained):
    prompt = ["generate", "tiny.yaml", "--prompt", "The quiet river", "--max_new_tokens", "12"]
    first = run(trained, *prompt)
    assert first.startswith("The quiet river")
    assert len(first) > len("The quiet river\n")
    assert run(trained, *prompt) == first
    assert run(trained, *prompt, "--seed", "1") != first


@pytest.mark.long
def test_a_named_checkpoint_is_the_one_used(trained):
    prompt = ["generate", "tiny.yaml", "--prompt", "The", "--max_new_tokens", "20", "--checkpoint"]
    run_folder = trained / "checkpoints" / "exported"
    assert run(trained, *prompt, str(run_folder)) == run(trained, *prompt, str(run_folder / "step-8"))
    assert run(trained, *prompt, str(run_folder / "step-4")) != run(trained, *prompt, str(run_folder / "step-8"))
