"""`lmtrain plan` without compilers for accelerators: fake CPU devices, and the state's memory for all others."""

import json

import pytest
from plan.workers import MODEL, forked_worker

from lmtrain.commands.plan import run
from lmtrain.plan import request
from lmtrain.runtime.errors import UserError


@pytest.fixture
def config(write_config, settings):
    """A small config without data or a tokenizer."""
    settings["data"] = {"tokenizer": "passthrough", "vocab_size": 500, "train_urls": ["not/there.jsonl"]}
    settings["model"] |= MODEL
    settings["trainer"]["train_batch_size"] = 64
    return write_config(settings)


@pytest.fixture
def plan(config, run_cli, tmp_path, monkeypatch):
    """Runs `lmtrain plan` in this process, with forked workers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    monkeypatch.setattr(request, "_running", forked_worker)
    return lambda *flags, name=config: run_cli("plan", name, *flags)


def test_the_steps_are_compiled_for_fake_devices_and_all_figures_are_printed(
    lmtrain, config, tmp_path, run_cli, monkeypatch
):
    """In a process as a user has it; then from the cache, as JSON."""
    flags = ("--devices", "16", "--model_axis_size", "4", "--tensor_parallel_axes", "[mlp, heads]")
    done = lmtrain("plan", config, *flags, XDG_CACHE_HOME=str(tmp_path / "kept"), code=0)
    for part in ("data 4 x model 4", "data.vocab_size", "training step", "evaluation step", "all-gather", "linear.py:"):
        assert part in done.stdout, part
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    again = run_cli("plan", config, *flags, "--json", code=0)
    assert "compiling" not in again.stderr
    found = json.loads(again.stdout)
    assert found["devices"] == 16
    assert found["mesh"] == {"replica": 1, "data": 4, "expert": 1, "context": 1, "model": 4}
    tokens = 64 * 64 / 16
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 512 * 64
    assert found["flops"]["model"] == pytest.approx(6 * tokens * (weights - 12 * 64))  # the table is padded to 512
    assert found["flops"]["compiled"] >= found["flops"]["model"]
    assert sum(row["wire_bytes"] for row in found["collectives"]) == pytest.approx(found["wire_bytes"])
    assert {loop["times"] for loop in found["loops"]} >= {2}


@pytest.fixture
def without_compilers(monkeypatch, tmp_path):
    """As on a machine without compilers, even if some are installed. Plans in this process."""
    monkeypatch.setattr("lmtrain.plan.request.installed_version", lambda package: None)
    monkeypatch.setattr(request, "_running", forked_worker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))


SMALL = ["gpt2_nano", "--data.tokenizer", "gpt2"]


def test_without_a_compiler_the_memory_of_the_state_is_printed_with_the_extra_to_install(without_compilers, capsys):
    assert run([*SMALL, "--device", "l4", "--devices", "8"]) == 0
    printed = capsys.readouterr()
    assert "jax[cuda12]" in printed.err
    assert "memory of the training state per device" in printed.out
    assert "50,257 tokens" in printed.out
    big = ["--model.hidden_dim", "8192", "--model.num_layers", "48", "--model.num_heads", "64"]
    assert run([*SMALL, "--device", "v5litepod-4", "--json", *big]) == 1
    printed = capsys.readouterr()
    assert "jax[tpu]" in printed.err
    found = json.loads(printed.out)
    assert (found["fits"], found["fits_by"]) == (False, "state")
    assert found["memory"]["state"] > found["memory"]["capacity"]


def test_attention_is_chosen_for_the_planned_device(plan):
    done = plan("--device", "v5e-4", "--no_compile", "--model.seq_len", "256", "--trainer.mp", "bf16")
    assert "attention   splash" in done.stdout, done.stdout + done.stderr
    done = plan("--device", "h100", "--no_compile", "--model.attn_backend", "cudnn", "--trainer.mp", "bf16")
    assert done.returncode == 2  # because of its segments, not because this is a CPU
    assert "data.mask_across_documents" in done.stderr
    done = plan("--device", "v5e", "--no_compile", "--model.attn_backend", "cudnn")
    assert "a TPU" in done.stderr


@pytest.mark.long
def test_a_known_model_is_planned_without_downloading_it(plan):
    flags = ("--no_compile", "--device", "h100", "--devices", "8", "--json")
    done = plan(*flags, name="mpt_7b_continued")
    assert json.loads(done.stdout)["parameters"] == pytest.approx(6.65e9, rel=0.01), done.stderr
    done = plan(*flags, "--initialize_from_hf", "who/knows", name="mpt_7b_continued")
    assert done.returncode == 2
    assert "the sizes of who/knows are unknown" in done.stderr


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--device", "h10"], ["--device h10", "h100"]),
        (["--slices", "2"], ["--slices", "--device"]),
        (["--minutes", "nan"], ["--minutes", "0.01 or more"]),
        (["--device", "v5p", "--slices", "1000000"], ["4,000,000 devices", "65,536"]),
        (["--hlo", "nowhere/x.hlo"], ["--hlo: nowhere/x.hlo", "folder that exists"]),
        (["--hlo", "/"], ["--hlo: /", "expected a file"]),
        (["--device", "h100", "--measure"], ["--measure", "remove --device"]),
        (["--search", "--devices", "2"], ["--search", "--device KIND", "--measure"]),
        (["--data.tokenizer", "some/unknown-tokenizer"], ["--vocab_size"]),
    ],
)
def test_user_errors_are_one_message_with_advice(without_compilers, flags, parts):
    with pytest.raises(UserError) as caught:
        run([*SMALL, *flags])
    for part in parts:
        assert part in str(caught.value)


def test_a_mesh_that_does_not_divide_is_refused_by_the_worker_as_by_training(plan):
    done = plan("--devices", "12", "--model_axis_size", "5")
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert "trainer.model_axis_size: 12 devices" in done.stderr


@pytest.mark.long
def test_after_a_timeout_of_the_compiler_the_memory_of_the_state_is_printed(plan):
    done = plan("--devices", "8", "--compile_timeout", "1", "--model.num_layers", "64", "--model.scan_layers", "false")
    assert done.returncode == 0, done.stderr
    assert "longer than --compile_timeout 1 s" in done.stderr
    assert "memory of the training state per device" in done.stdout
    assert "training step as compiled" not in done.stdout


@pytest.mark.long
def test_the_program_is_written_and_measure_runs_candidates_on_this_machine(plan, tmp_path):
    plan("--devices", "1", "--hlo", "step.txt")
    assert "ENTRY" in (tmp_path / "step.txt").read_text()
    done = plan("--measure", "--minutes", "0.02", "--model.num_layers", "1", "--trainer.train_batch_size", "4")
    assert done.returncode == 0, done.stderr
    assert "s per step" in done.stdout
    assert "the config: " in done.stderr
