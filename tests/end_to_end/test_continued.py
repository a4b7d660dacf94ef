"""Training from a Hugging Face model and exporting one, with YAML and the command line, compared with transformers."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TOKENIZER, TRAIN_FILES, logged, run_in_process, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.end_to_end

VOCAB = 384


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with `base`, a small Llama that transformers made, and `tiny.yaml`, which trains from it."""
    folder = tmp_path_factory.mktemp("continued")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=500.0,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    model.save_pretrained(folder / "base")
    for name in os.listdir(TOKENIZER):
        shutil.copy(TOKENIZER / name, folder / "base")
    settings = tiny_settings()
    del settings["data"]["tokenizer"]
    settings["model"] = {"type": "llama", "seq_len": 32}
    settings |= {"initialize_from_hf": "base", "use_hf_model_config": True}
    settings |= {"hf_save_path": "exports", "hf_save_steps": 2}
    settings["trainer"] |= {"num_train_steps": 5, "id": "continued"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return folder


def run(folder, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    return run_in_process(arguments, folder, code)


@pytest.fixture(scope="module")
def trained(folder):
    """The folder after training, and the output of training."""
    return folder, run(folder, "train", "tiny.yaml").stderr


def test_the_first_loss_is_what_transformers_computes_on_that_batch(trained):
    folder, output = trained
    assert "base: llama, 2 layers of 32" in output
    assert "using the tokenizer of base" in output
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    texts = [json.loads(line)["text"] for line in Path(TRAIN_FILES[0]).read_text().splitlines()]
    ids = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    tokens = torch.tensor(ids[: 4 * 32]).view(4, 32)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder / "base")(tokens, labels=tokens).loss.item()
    assert logged(folder, "train/loss", "continued")[1] == pytest.approx(expected, abs=1e-4)


def test_exports_of_every_second_and_the_last_step_equal_the_checkpoints(trained):
    folder, output = trained
    assert sorted(os.listdir(folder / "exports" / "continued")) == ["step-2", "step-4", "step-5"]
    assert "exported exports/continued/step-5" in output
    run(folder, "export-hf", "tiny.yaml", "--checkpoint", "checkpoints/continued/step-4", "--output", "by_hand")
    files = sorted(os.listdir(folder / "by_hand"))
    assert files == sorted(os.listdir(folder / "exports" / "continued" / "step-4"))
    for name in files:
        expected = (folder / "by_hand" / name).read_bytes()
        assert (folder / "exports" / "continued" / "step-4" / name).read_bytes() == expected, name
    loaded = AutoModelForCausalLM.from_pretrained(folder / "exports" / "continued" / "step-5")
    before = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert not torch.equal(loaded.lm_head.weight, before.lm_head.weight)


@pytest.mark.long
def test_export_hf_with_verify_logs_the_difference_of_the_logits(trained):
    folder, _ = trained
    done = run(folder, "export-hf", "tiny.yaml", "--output", "verified", "--dtype", "bfloat16", "--verify")
    assert "verified: logits agree with transformers' within" in done.stderr


@pytest.mark.long
def test_a_failed_export_is_logged_and_the_run_continues_and_exits_with_1(folder):
    """The folders for the exports of two steps contain another file."""
    for step in (2, 3):
        (folder / "in_the_way" / "failing" / f"step-{step}").mkdir(parents=True)
        (folder / "in_the_way" / "failing" / f"step-{step}" / "photo.png").write_text("")
    flags = ["--hf_save_path", "in_the_way", "--trainer.id", "failing", "--trainer.num_train_steps", "3"]
    done = run(folder, "train", "tiny.yaml", *flags, code=1)
    assert "export of step 2 failed, training continues" in done.stderr
    assert "exports of step 2, 3 failed; run `lmtrain export-hf`" in done.stderr
    assert (folder / "checkpoints" / "failing" / "step-3").is_dir()
    # after its removal the same command writes the last export
    shutil.rmtree(folder / "in_the_way")
    run(folder, "train", "tiny.yaml", *flags)
    assert os.listdir(folder / "in_the_way" / "failing") == ["step-3"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model.num_heads", "8"], "model.num_heads: "),
        (["--model.type", "gpt2"], "model.type: gpt2, but base is of type llama"),
        (["--use_hf_model_config", "false", "--model.hidden_dim", "64"], "  model.hidden_dim: this config has 64, "),
        (["--initialize_from_hf", "acme/nothing"], "acme/nothing: "),
    ],
)
def test_mistakes_are_errors_before_the_first_step(trained, flags, named):
    folder, _ = trained
    assert named in run(folder, "train", "tiny.yaml", "--trainer.id", "mistaken", *flags, code=2).stderr
    assert not (folder / "checkpoints" / "mistaken").exists()


def test_a_missing_export_is_written_on_resume_without_reading_the_base_weights_again(trained):
    folder, _ = trained
    shutil.copytree(folder, folder.parent / "again")
    again = folder.parent / "again"
    shutil.rmtree(again / "exports" / "continued" / "step-4")
    shutil.rmtree(again / "checkpoints" / "continued" / "step-5")
    shutil.rmtree(again / "exports" / "continued" / "step-5")
    (again / "base" / "model.safetensors").unlink()
    output = run(again, "train", "tiny.yaml").stderr
    assert "resuming after step 4" in output
    assert "exported exports/continued/step-4" in output
    for step in (4, 5):
        name = f"exports/continued/step-{step}/model.safetensors"
        assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.long
def test_generate_and_eval_accept_a_hugging_face_model(trained):
    folder, _ = trained
    prompt = ["generate", "--hf", "exports/continued/step-5", "--prompt", "The quiet", "--temperature", "0"]
    found = run(folder, *prompt, "--max_new_tokens", "8").stdout
    own = ["generate", "tiny.yaml", "--prompt", "The quiet", "--temperature", "0", "--max_new_tokens", "8"]
    assert found == run(folder, *own).stdout
    result = json.loads(run(folder, "eval", "tiny.yaml", "--hf", "exports/continued/step-5").stdout)
    expected = json.loads(run(folder, "eval", "tiny.yaml").stdout)
    assert result == expected | {"step": None}
