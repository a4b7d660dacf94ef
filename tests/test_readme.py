"""The README is correct: its commands run, its tables are complete, and it has the terms that people search for.

test_guides.py checks what applies to all pages.
"""

import os
import re
import shutil
import subprocess
import warnings

import numpy as np
import pytest
from conftest import TOKENIZER, run_in_process
from forked import run_script
from pages import ROOT, run_as_written, write_own_text
from plan.workers import forked_worker

from lmtrain.cli import VERBS
from lmtrain.plan import request
from lmtrain.runtime.errors import counted

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()

# The README trains a real model; the test trains a tiny one of the same family in seconds.
SMALL = [
    *("--model", "{hidden_dim: 32, num_heads: 2, num_layers: 2, seq_len: 32}"),
    *("--trainer.train_batch_size", "4", "--trainer.checkpointer.keep", "[{every: 2}]"),
]
SHORT = ["--trainer.num_train_steps", "4"]


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def own_text(tmp_path):
    return write_own_text(tmp_path)


def commands_about(word: str) -> list[str]:
    """The README's lmtrain commands in the blocks that contain this word."""
    lines = [line for block in blocks("bash") if word in block for line in block.splitlines()]
    return [line for line in lines if line.startswith("lmtrain ")]


CHECKPOINTS = commands_about("lmtrain checkpoint")
REPORT = commands_about("lmtrain report")
DOCTOR = commands_about("lmtrain doctor")
PLANS = commands_about("lmtrain plan llama3_8b")  # run with the accelerators' compilers by tests/compiled/test_plan.py


def test_every_command_is_run_by_one_of_these_tests():
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("lmtrain ")]
    assert sorted(lines) == sorted(
        commands_about("my.yaml") + CHECKPOINTS + REPORT + DOCTOR + commands_about("continued.yaml") + PLANS
    )


@pytest.mark.long
def test_continuing_from_another_model_runs_as_written(own_text):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes)).save_pretrained(own_text / "my_base_model")
    for name in os.listdir(TOKENIZER):
        shutil.copy(TOKENIZER / name, own_text / "my_base_model")
    (own_text / "continued.yaml").write_text(next(block for block in blocks("yaml") if "continued.yaml" in block))
    few = ["--model.seq_len", "32", "--hf_save_steps", "2", *SHORT]
    run_as_written(own_text, "lmtrain train continued.yaml", few)
    for command in commands_about("continued.yaml"):
        run_as_written(own_text, command, few if "continued.yaml" in command else [])
    (run,) = (own_text / "exports").iterdir()
    assert sorted(os.listdir(run)) == ["step-2", "step-4"]


def test_commands_on_own_text_run_as_written(own_text, monkeypatch):
    monkeypatch.setattr(request, "_running", forked_worker)
    tmp_path = own_text
    (tmp_path / "my.yaml").write_text(blocks("yaml")[0])
    commands = commands_about("my.yaml")
    verbs = ["tokenizer", "train", "eval", "generate", "export-hf", "plan"]
    assert [command.split()[1] for command in commands] == verbs
    for command in commands:
        run_as_written(tmp_path, command, [] if command.split()[1] == "tokenizer" else SMALL + SHORT)
    for command in CHECKPOINTS:
        assert "step-4" in run_as_written(tmp_path, command, []).stdout
    for command in REPORT + DOCTOR:
        run_as_written(tmp_path, command, [])
    assert list((tmp_path / "logs").glob("my-*/report.html"))
    assert (tmp_path / "my_model" / "model.safetensors").exists()
    assert any(name.name.startswith("events.") for name in (tmp_path / "tblogs").rglob("*"))


def test_the_program_in_python_trains_and_resumes_as_written(own_text):
    (own_text / "my_tokenizer").symlink_to(TOKENIZER)
    (program,) = blocks("python")
    for expected in ("saved ", "nothing to do: "):
        output = run_script(program, folder=own_text)
        assert expected in output
        assert re.fullmatch(r"checkpoints/tiny_llama-\w+/step-20 \(1, \d+, 384\)", output.splitlines()[-1]), output


def test_the_mixture_of_the_guide_is_tokenized_as_written(tmp_path):
    import pyarrow
    import zstandard
    from pyarrow import parquet

    for name in ("web", "code"):
        (tmp_path / name).mkdir()
    for name in ("web", "wikipedia"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a word"}\n')
    (tmp_path / "web" / "a.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "one page"}\n' * 3))
    parquet.write_table(pyarrow.table({"content": ["x = 1", "y = 2"]}), tmp_path / "code" / "a.parquet")
    (tmp_path / "my_tokenizer").symlink_to(TOKENIZER)
    guide = (ROOT / "configs" / "guide" / "data.md").read_text()
    (tmp_path / "mixture.yaml").write_text(next(block for block in blocks("yaml", guide) if "mixture.yaml" in block))
    done = run_in_process(["preprocess", "mixture.yaml"], tmp_path, code=0)
    sizes = {"web/train": 3, "web/validation": 1, "code/train": 2, "wikipedia/validation": 1}
    for name, documents in sizes.items():
        assert f"cache/mixture/{name}: complete, {counted(documents, 'document')}, " in done.stderr


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository, with this .venv."""
    if not (ROOT / ".venv").exists():
        pytest.fail("tools/test.sh makes .venv, which the quickstart uses")
    # update an outdated .venv here, else the copy would install itself in it
    subprocess.run(["bash", "tools/install.sh", "dev"], cwd=ROOT, check=True)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    return tmp_path


@pytest.mark.long
def test_a_result_is_reproduced_by_the_command_of_the_readme(clone):
    command = ["bash", "tools/reproduce.sh", "shakespeare_char_modern", "--check"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert (clone / "reproduced" / "shakespeare_char_modern" / "check" / "result.json").exists()


@pytest.mark.long
def test_the_quickstart_runs_from_text_to_export(clone):
    """The real script, with 4 steps instead of 300."""
    command = ["bash", "tools/quickstart.sh", *SHORT, "--trainer.max_eval_batches", "1"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "train 4/4, loss" in done.stderr
    assert "    def test_read(self):" in done.stdout
    assert (clone / "exports" / "gpt2_nano" / "config.json").exists()
    assert len(os.listdir(clone / "checkpoints")) == 1
    (in_transformers,) = (line for line in done.stdout.splitlines() if line.startswith("  python -c "))
    shell = ["bash", "-c", f"source .venv/bin/activate; {in_transformers}"]
    sampled = subprocess.run(shell, cwd=clone, capture_output=True, text=True, timeout=300)
    assert "'generated_text': 'import os" in sampled.stdout, sampled.stderr


@pytest.mark.long
@pytest.mark.release  # tests/test_finetuning.py follows the guide to a chat model
def test_the_quickstart_of_chat_teaches_a_format_and_exports_it(clone):
    """The real script with half the steps: the accuracy rises, and adapter and merged model give the same logits."""
    command = ["bash", "tools/quickstart_chat.sh", "--trainer.num_train_steps", "80", "--trainer.steps_per_eval", "80"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    before, after = (float(found) for found in re.findall(r'"eval/lm_eval/line_kinds/acc": ([\d.]+)', done.stdout))
    assert before < 0.3
    assert after > 0.8
    assert "It imports a module." in done.stdout
    adapted, merged = logits_of_exports(clone / "exports")
    np.testing.assert_allclose(adapted, merged, rtol=0, atol=1e-4)


@pytest.mark.long
@pytest.mark.release  # tests/test_finetuning.py follows the guide
def test_the_quickstart_of_preferences_raises_the_accuracy_on_held_out_pairs(clone):
    """The real script with fewer steps: 200 of pretraining and of DPO."""
    command = ["bash", "tools/quickstart_preferences.sh"]
    command += ["--trainer.num_train_steps", "200", "--trainer.steps_per_eval", "50"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    shares = [float(found) for found in re.findall(r"([\d.]+) % of pairs right", done.stderr)]
    assert shares[-1] > 60
    assert (clone / "exports" / "llama_nano_dpo" / "config.json").exists()


def logits_of_exports(exports):
    """Logits of transformers: of the base with the adapter, and of the merged model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged, base = (
        AutoModelForCausalLM.from_pretrained(exports / name, dtype=torch.float32).eval()
        for name in ("llama_nano_chat_merged", "llama_nano")
    )
    base.resize_token_embeddings(merged.config.vocab_size, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # used by PEFT
        adapted = PeftModel.from_pretrained(base, exports / "llama_nano_chat").eval()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, merged.config.vocab_size, (2, 64)))
    with torch.no_grad():
        return adapted(tokens).logits.numpy(), merged(tokens).logits.numpy()


def test_pages_can_be_read():
    assert len(README.splitlines()) < 250
    assert (ROOT / "BUILD-notes.md").stat().st_size <= 45_000


def test_the_table_of_commands_is_the_list_of_verbs():
    table = re.findall(r"^\| `lmtrain (\S+)", README, re.MULTILINE)
    assert list(dict.fromkeys(table)) == list(VERBS)


def test_the_tree_names_every_package():
    tree = next(block for block in blocks("text", CONTRIBUTING) if "lmtrain/\n" in block)
    named = set(re.findall(r"^ {2}(\w+)/", tree, re.MULTILINE))
    packages = {path.name for path in (ROOT / "lmtrain").iterdir() if (path / "__init__.py").exists()}
    assert named == packages
