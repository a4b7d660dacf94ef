"""LoRA from the command line: train, resume, evaluate, generate, export; and a base that is missing or has changed."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from conftest import TOKENIZER, logged, run_in_process, tiny_settings
from end_to_end.small_models import assert_resumes_with_the_same_bits, copy_of_base, write
from faults.runs import arrays
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # used by PEFT
]


def lora_settings(**lora):
    settings = tiny_settings()
    settings["model"] = {"type": "llama", "seq_len": 32}
    settings["trainer"] |= {"id": "adapters", "num_train_steps": 8}
    more = {"initialize_from_hf": "base", "use_hf_model_config": True, "hf_save_path": "exports", "hf_save_steps": 4}
    return settings | more | {"lora": {"r": 4, "alpha": 32, "dropout": 0.1, **lora}}


def run(folder, *arguments, code=0):
    return run_in_process(arguments, folder, code)


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """A folder with a run `base`, its export `base`, and lora.yaml, trained for 8 steps."""
    folder = copy_of_base(tiny_llama, tmp_path_factory, "lora")
    write(folder, "lora", lora_settings())
    run(folder, "train", "lora.yaml")
    return folder


def test_a_checkpoint_has_the_adapters_only_with_the_fingerprint_of_the_base(folder):
    names = arrays(folder, 8, "adapters")
    assert len(names) > 14
    assert {name.rpartition("['")[2] for name in names if name.startswith("['params']")} == {"lora_a']", "lora_b']"}
    info = json.loads((folder / "checkpoints/adapters/step-8/run.json").read_text())
    assert info["base"]["initialize_from_hf"] == "base"
    assert len(info["base"]["fingerprint"]) == 32


def test_a_run_that_is_resumed_ends_with_the_same_bits(folder):
    assert_resumes_with_the_same_bits(folder, "lora.yaml", "adapters")


def test_exports_as_adapter_and_merged_give_the_same_logits_and_loss_as_the_model(folder):
    run(folder, "export-hf", "lora.yaml", "--output", "adapter", "--verify")
    run(folder, "export-hf", "lora.yaml", "--output", "merged", "--merge", "--verify")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / "exports/adapters/step-8" / name).read_bytes() == (folder / "adapter" / name).read_bytes()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 384, (2, 32)))

    def logits(model):
        with torch.no_grad():
            return model.eval()(tokens).logits.numpy()

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    without = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, folder / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32))
    assert np.abs(adapted - without).max() > 1e-2
    np.testing.assert_allclose(adapted, merged, rtol=0, atol=1e-4)
    (*_, loss) = logged(folder, "eval/loss", "adapters").values()
    for flags in (["lora.yaml"], ["--run", "adapters"], ["lora.yaml", "--hf", "merged"]):
        assert json.loads(run(folder, "eval", *flags).stdout)["eval/loss"] == pytest.approx(loss, abs=1e-5)


def test_a_missing_or_changed_base_is_a_user_error(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = copy / "base/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for command in (("train", "lora.yaml", "--trainer.num_train_steps", "9"), ("eval", "lora.yaml")):
        done = run(copy, *command, code=2)
        assert "the base model of the adapters has changed" in done.stderr
    weights.unlink()
    assert "no model.safetensors" in run(copy, "export-hf", "lora.yaml", "--output", "x", code=2).stderr
    assert not (copy / "x").exists()


def test_an_adapter_is_not_a_model_and_a_model_is_not_an_adapter(folder):
    adapter = "exports/adapters/step-8"
    done = run(folder, "generate", "--hf", adapter, "--prompt", "x", code=2)
    assert f"{adapter}: is a PEFT adapter" in done.stderr
    for wrong in ("base", "nowhere/at all"):
        done = run(folder, "train", "lora.yaml", "--trainer.id", "wrong", "--lora.initialize_from", wrong, code=2)
        assert "error: lora.initialize_from: " in done.stderr
        assert wrong in done.stderr
    assert not (folder / "checkpoints/wrong").exists()


@pytest.mark.long
def test_a_checkpoint_is_a_base_with_averages_and_tables_trained_in_full(folder):
    settings = lora_settings(modules_to_save=["embed_tokens", "lm_head"])
    for name in ("initialize_from_hf", "use_hf_model_config"):
        del settings[name]
    base = yaml.safe_load((folder / "base.yaml").read_text())
    settings |= {"model": base["model"], "initialize_from_checkpoint_path": "checkpoints/base"}
    settings["trainer"] |= {"id": "on a checkpoint".replace(" ", "-"), "model_averaging": {"type": "ema", "beta": 0.5}}
    write(folder, "checkpoint", settings)
    run(folder, "train", "checkpoint.yaml")
    info = json.loads((folder / "checkpoints/on-a-checkpoint/step-8/run.json").read_text())
    assert info["base"]["step"] == 12
    output = run(folder, "export-hf", "checkpoint.yaml", "--output", "second").stderr
    assert "add --base_model REF" in output
    run(folder, "export-hf", "checkpoint.yaml", "--output", "second", "--base_model", "base", "--verify")
    run(folder, "export-hf", "checkpoint.yaml", "--output", "second merged", "--merge", "--verify")
    # the base run continues: its new checkpoint is not the base of the adapters
    run(folder, "train", "base.yaml", "--trainer.num_train_steps", "14")
    assert "resuming after step 8" in run(folder, "train", "checkpoint.yaml", "--trainer.num_train_steps", "9").stderr
    of_adapters = ("--trainer.id", "x", "--initialize_from_checkpoint_path", "checkpoints/adapters")
    no_hf = ("--initialize_from_hf", "false", "--use_hf_model_config", "false")
    done = run(folder, "train", "lora.yaml", *of_adapters, *no_hf, code=2)
    assert "adapters only" in done.stderr or "does not match" in done.stderr


@pytest.mark.long
def test_training_starts_from_a_peft_adapter(folder):
    settings = lora_settings(initialize_from="exports/adapters/step-8")
    settings["trainer"] |= {"id": "continued", "num_train_steps": 2, "steps_per_eval": 1}
    del settings["hf_save_path"], settings["hf_save_steps"]
    write(folder, "continued", settings)
    output = run(folder, "train", "continued.yaml").stderr
    assert "starting from the adapters of exports/adapters/step-8" in output
    assert "base model (" not in output
    assert "does not record" not in output
    (folder / "exports").rename(folder / "moved")  # a run that resumes does not need it
    assert "resuming after step 2" in run(folder, "train", "continued.yaml", "--trainer.num_train_steps", "3").stderr
    (folder / "moved").rename(folder / "exports")
    settings["lora"]["r"] = 8
    settings["trainer"]["id"] = "other"
    write(folder, "other", settings)
    assert "lora.r: this config has 8, the adapter has 4" in run(folder, "train", "other.yaml", code=2).stderr


def test_an_adapter_of_another_base_of_the_same_shape_is_refused(folder, tmp_path):
    """Its weights differ by one percent, as those of a base that was trained a little longer."""
    other = tmp_path / "other"
    shutil.copytree(folder / "base", other)
    weights = load_file(other / "model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"})
    settings = lora_settings(initialize_from="exports/adapters/step-8") | {"initialize_from_hf": str(other)}
    settings["trainer"] |= {"id": "other-base", "num_train_steps": 2}
    write(folder, "another", settings)
    output = run(folder, "train", "another.yaml", code=2).stderr
    assert "lora.initialize_from: exports/adapters/step-8 was trained on another base model" in output


@pytest.mark.long
def test_tokens_that_the_base_does_not_have_need_trained_tables(folder):
    from tokenizers import Tokenizer

    larger = folder / "larger"
    shutil.copytree(TOKENIZER, larger)
    backend = Tokenizer.from_file(str(larger / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(larger / "tokenizer.json"))
    settings = lora_settings()
    settings["data"] |= {"tokenizer": "larger", "cache_dir": "larger cache"}
    settings["trainer"] |= {"id": "larger", "num_train_steps": 2}
    write(folder, "larger", settings)
    output = run(folder, "train", "larger.yaml", code=2).stderr
    assert "lora.modules_to_save: [embed_tokens, lm_head]" in output
    settings["lora"]["modules_to_save"] = ["embed_tokens", "lm_head"]
    write(folder, "larger", settings)
    output = run(folder, "train", "larger.yaml").stderr
    assert "2 rows are added to 384" in output
    run(folder, "export-hf", "larger.yaml", "--output", "larger adapter", "--verify")
