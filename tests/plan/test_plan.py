"""`lmtrain plan` without compilers for accelerators: fake CPU devices, and the estimate for all others."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TOKENIZER
from forked import Forked

from lmtrain.commands.plan import run
from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.plan import answers
from lmtrain.plan.answers import Answer, quote
from lmtrain.plan.candidates import alternatives, parallelisms, to_yaml
from lmtrain.plan.gpu_targets import target_config
from lmtrain.plan.request import Request, Target
from lmtrain.plan.search import Search, find_settings, first_that_fits
from lmtrain.plan.vocabulary import find_vocab_size
from lmtrain.run.config import RunConfig
from lmtrain.runtime.topologies import KINDS, find_topology

MODEL = {"hidden_dim": 64, "num_heads": 4, "num_layers": 2, "seq_len": 64}
JSON_KEYS = {"device", "devices", "topology", "mesh", "attention", "parameters", "microbatches", "memory", "flops",
             "hbm_bytes", "wire_bytes", "wire_minimum", "collectives", "loops"}  # fmt: skip


@contextlib.contextmanager
def forked_worker(command, log, variables):
    """Replaces the start of a worker, without the seconds of its imports."""
    assert command[:3] == [sys.executable, "-m", "lmtrain.plan.worker"]
    script = "import sys; from lmtrain.plan.worker import main; sys.exit(main(sys.argv[1:]))"
    process = Forked(command[3:], Path.cwd(), Path(log.name), script, **variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


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
    monkeypatch.setattr(answers, "_running", forked_worker)
    return lambda *flags, name=config: run_cli("plan", name, *flags)


def test_the_steps_are_compiled_for_fake_devices_and_all_figures_are_printed(lmtrain, config, tmp_path):
    """In processes as a user has them."""
    flags = ("--devices", "16", "--model_axis_size", "4", "--tensor_parallel_axes", "[mlp, heads]")
    plan = functools.partial(lmtrain, "plan", config, *flags, XDG_CACHE_HOME=str(tmp_path / "kept"))
    done = plan()
    assert done.returncode == 0, done.stderr
    for part in (
        "replica 1 x data 4 x model 4",
        "embed 64/data 4, mlp 256/model 4",
        "500 tokens, from data.vocab_size",
        "training step as compiled",
        "evaluation step as compiled",
        "all-gather",
        "models/layers/linear.py:",
    ):
        assert part in done.stdout, part
    again = plan()
    assert again.stdout == done.stdout
    assert "compiling" not in again.stderr  # it is read from the cache


def test_json_alone_is_on_stdout_and_the_program_in_its_file(plan, tmp_path):
    done = plan("--devices", "4", "--json", "--hlo", "step.txt", "--step", "train")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= JSON_KEYS
    assert found["devices"] == 4
    assert found["mesh"] == {"replica": 1, "data": 4, "model": 1}
    assert found["memory"].keys() >= {"arguments", "peak", "temporary", "capacity", "estimate"}
    tokens = 64 * 64 / 4
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 512 * 64
    assert found["flops"]["model"] == pytest.approx(6 * tokens * (weights - 12 * 64))  # the table is padded to 512
    assert found["flops"]["compiled"] >= found["flops"]["model"]
    row = found["collectives"][0]
    assert row.keys() >= {
        "kind",
        "devices",
        "network",
        "dtype",
        "bytes",
        "times",
        "wire_bytes",
        "asynchronous",
        "where",
    }
    assert sum(row["wire_bytes"] for row in found["collectives"]) == pytest.approx(found["wire_bytes"])
    assert {loop["times"] for loop in found["loops"]} >= {2}
    assert "ENTRY" in (tmp_path / "step.txt").read_text()


@pytest.fixture
def without_compilers(monkeypatch, tmp_path):
    """As on a machine without compilers, even if some are installed. Plans in this process."""
    monkeypatch.setattr("lmtrain.plan.request._is_installed", lambda module: False)
    monkeypatch.setattr(answers, "_running", forked_worker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))


SMALL = ["gpt2_nano", "--data.tokenizer", "gpt2"]


def test_without_a_compiler_the_estimate_is_printed_with_the_extra_to_install(without_compilers, capsys):
    assert run([*SMALL, "--device", "l4", "--devices", "8"]) == 0
    printed = capsys.readouterr()
    assert "lmtrain[cuda12]" in printed.err
    for part in (
        "memory per device, estimated",
        "50,257 tokens, from known size of gpt2",
        "fits: ",
        "(by the estimate)",
    ):
        assert part in printed.out
    big = ["--model.hidden_dim", "8192", "--model.num_layers", "48", "--model.num_heads", "64"]
    assert run([*SMALL, "--device", "v5litepod-4", "--json", *big]) == 1
    printed = capsys.readouterr()
    assert "lmtrain[tpu]" in printed.err
    found = json.loads(printed.out)
    assert found["fits"] is False
    assert found["memory"]["estimate"] > found["memory"]["capacity"]


def test_a_search_without_a_compiler_says_what_to_install(without_compilers):
    with pytest.raises(UserError, match=r"--search .* h100: pip install 'lmtrain\[cuda12\]'"):
        run([*SMALL, "--device", "h100", "--search"])


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
        (["--device", "v5p", "--topology", "7x7x7"], ["--topology 7x7x7", "nearest"]),
        (["--topology", "2x2"], ["--topology", "--device"]),
        (["--slices", "2"], ["--slices", "--device"]),
        (["--device", "h100", "--search", "--hlo", "x"], ["--hlo", "no effect"]),
        (["--device", "h100", "--minutes", "0"], ["--minutes", "above 0"]),
        (["--compile_timeout", "-1"], ["--compile_timeout", "above 0"]),
        (["--minutes", "nan"], ["--minutes", "above 0"]),
        (["--device", "h100", "--slices", "2"], ["--slices", "--hosts"]),
        (["--device", "v5p", "--slices", "1000000"], ["4,000,000 devices", "65,536"]),
        (["--no-compile"], ["did you mean --no_compile"]),
        (["--hlo", "nowhere/x.hlo"], ["--hlo nowhere/x.hlo", "create it"]),
        (["--hlo", "/"], ["--hlo /", "is a folder"]),
        (["--devices", "0"], ["--devices"]),
        (["--device", "h100", "--measure"], ["--measure", "remove --device"]),
        (["--search", "--devices", "2"], ["--search", "--device KIND", "--measure"]),
        (["--data.tokenizer", "some/unknown-tokenizer"], ["--vocab_size"]),
        (["--vocab_size", "0"], ["--vocab_size"]),
        (["--step", "both"], ["--step"]),
        (["--compile_timout", "3"], ["--compile_timeout"]),
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
    assert "trainer.model_axis_size: 12 devices do not divide by 5; it could be 4 or 6" in done.stderr


@pytest.mark.long
def test_after_a_timeout_of_the_compiler_the_estimate_is_printed(plan):
    done = plan("--devices", "8", "--compile_timeout", "1", "--model.num_layers", "64", "--model.scan_layers", "false")
    assert done.returncode == 0, done.stderr
    assert "longer than --compile_timeout 1 s" in done.stderr
    assert "memory per device, estimated" in done.stdout
    assert "training step as compiled" not in done.stdout


@pytest.mark.long
def test_measure_runs_candidates_on_this_machine(plan):
    done = plan("--measure", "--minutes", "0.02", "--model.num_layers", "1", "--trainer.train_batch_size", "4")
    assert done.returncode == 0, done.stderr
    assert "s per step" in done.stdout
    assert "the config: " in done.stderr


# The remaining tests start no process.


def data(**values) -> DataConfig:
    return DataConfig(**{"train_urls": ["x"], **values})


def test_the_vocabulary_comes_from_the_flag_the_config_a_folder_or_the_table(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_vocab_size(data(), 7) == (7, "--vocab_size")
    assert find_vocab_size(data(tokenizer="passthrough", vocab_size=9, enforce_eos=False), None)[0] == 9
    assert find_vocab_size(data(), None) == (50257, "known size of gpt2")
    assert find_vocab_size(data(tokenizer="meta-llama/Meta-Llama-3-8B@main"), None)[0] == 128256
    assert find_vocab_size(data(tokenizer=str(TOKENIZER)), None)[0] == 384
    assert find_vocab_size(data(tokenizer="byte"), None)[0] == 257
    assert find_vocab_size(DataConfig(demo="nowhere", tokenizer="nowhere/tokenizer"), None)[0] == 8192
    with pytest.raises(UserError, match="--vocab_size N"):
        find_vocab_size(data(tokenizer="who/knows"), None)


def test_every_kind_of_gpu_has_a_target_config():
    for kind in KINDS:
        if not kind.startswith("v"):
            text = target_config(kind)
            assert "core_count" in text
            assert text.count("{") == text.count("}")


def request(**trainer) -> Request:
    config = RunConfig(model={"type": "llama", **MODEL}, trainer={"train_batch_size": 96, **trainer})
    return Request.of(config, 500, Target.of(find_topology("h100", devices=8)), ("train",), True)


def test_a_request_survives_json_and_its_key_depends_on_the_program():
    one = request()
    assert Request.from_json(one.to_json()) == one
    assert one.run_config.model == RunConfig(model={"type": "llama", **MODEL}).model
    assert request(tracker={"type": "json"}, id="x").key == one.key
    assert request(model_axis_size=2).key != one.key
    assert one.changed({"trainer.model_axis_size": 2}).key == request(model_axis_size=2).key
    assert one.changed({}, steps=("eval",)).key != one.key


def test_the_devices_of_this_machine_count_once_they_are_known():
    assert Target().num_devices == 1
    assert Target(found=8).num_devices == 8
    assert Target(shape=(4,), found=8).num_devices == 4
    assert Target.of(find_topology("h100", devices=16)).num_devices == 16


def test_candidates_do_not_change_training_dynamics():
    one = request()
    assert parallelisms(one) == [12, 6, 4, 3, 2, 1]
    assert parallelisms(one, {"trainer.model_axis_size": 4}) == [48, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    fixed = {"trainer": {"train_batch_size", "mp", "seed", "num_train_steps"}, "model": {"seq_len", "hidden_dim"}}
    for name, changes in alternatives(one, {}):
        config = one.changed(changes).run_config
        assert changes, name
        for section, names in fixed.items():
            assert getattr(config, section).model_dump(include=names) == getattr(one.run_config, section).model_dump(
                include=names
            )
    names = [name for name, _ in alternatives(one, {})]
    assert "gradient_checkpointing dots" in names
    assert "gradient_checkpointing full" not in names  # the config has it already
    assert "gradient_checkpointing false, scan_layers false" in names  # each alone gains nothing
    assert len(names) == len(set(names))


def test_found_settings_are_printed_as_yaml():
    changes = {"model.gradient_checkpointing": False, "trainer.tensor_parallel_axes": ["mlp", "heads"],
               "trainer.model_axis_size": 2}  # fmt: skip
    assert "\n".join(to_yaml(changes)) == (
        "model:\n  gradient_checkpointing: false\ntrainer:\n  model_axis_size: 2\n  tensor_parallel_axes: [mlp, heads]"
    )


class Compiler:
    """Replaces workers: with more sequences per microbatch or less recomputation, time falls and memory grows."""

    def __init__(self, capacity: float):
        self.capacity = capacity
        self.compiled = 0

    def __call__(self, asked: Request, timeout, progress=lambda text: None) -> Answer:
        config = asked.run_config
        size = config.trainer.per_device_parallelism
        size = parallelisms(asked)[0] if size == -1 else size
        keeps = {False: 8, "dots": 4}.get(config.model.gradient_checkpointing, 1)
        peak = 10.0 + size * keeps
        estimate = {"estimate": {"total": peak}, "device": "h100"}
        if not asked.compile:
            return Answer(estimate)
        self.compiled += 1
        seconds = 4.0 / size - 0.01 * keeps
        return Answer(estimate, {"train": {"step": "train", "memory": {"peak": peak}, "seconds": {"total": seconds}}})


@pytest.mark.parametrize(("capacity", "size"), [(15.0, 4), (11.5, 1), (10.5, None)])
def test_the_largest_size_that_fits_is_found_by_bisection(monkeypatch, capacity, size):
    compiler = Compiler(capacity)
    monkeypatch.setattr("lmtrain.plan.search.ask", compiler)
    found = first_that_fits(request(), capacity, 60.0, lambda text: None)
    assert (found and found.changes["trainer.per_device_parallelism"]) == size
    assert compiler.compiled <= 12


def test_the_search_ends_with_the_fastest_that_fits_and_counts_the_rest(monkeypatch):
    compiler = Compiler(capacity=20.0)
    monkeypatch.setattr("lmtrain.plan.search.ask", compiler)
    lines: list[str] = []
    found = find_settings(request(), 20.0, 1.0, 60.0, lines.append, lambda text: None, Search())
    best = found.best
    assert best is not None
    assert best.peak <= 20
    assert best.changes["trainer.per_device_parallelism"] == 6
    assert found.too_large > 0
    assert found.untried == 0
    assert len(lines) == len(found.trials) == compiler.compiled


def test_a_search_at_its_time_limit_keeps_its_results_and_counts_untried_candidates(monkeypatch):
    monkeypatch.setattr("lmtrain.plan.search.ask", Compiler(capacity=20.0))
    found = find_settings(request(), 20.0, 0.0, 60.0, lambda text: None, lambda text: None, Search())
    assert found.best is None
    assert found.untried > 0


def test_an_interrupted_search_keeps_its_results_and_counts_the_rest(monkeypatch):
    compiler = Compiler(capacity=20.0)

    def interrupted(asked, timeout, progress):
        if compiler.compiled == 4:
            raise KeyboardInterrupt
        return compiler(asked, timeout)

    monkeypatch.setattr("lmtrain.plan.search.ask", interrupted)
    found = Search()
    with pytest.raises(KeyboardInterrupt):
        find_settings(request(), 20.0, 1.0, 60.0, lambda text: None, lambda text: None, found)
    assert found.best is not None
    assert found.untried > 5


def test_errors_of_a_failed_compiler_are_shortened():
    log = (
        "Jax plugin configuration error: noise\nTraceback (most recent call last):\n  File x\n    code\n"
        "W0000 00:00 noise\njax.errors.JaxRuntimeError: INTERNAL: RET_CHECK failure (a.cc:1) it broke " + "x" * 900
    )
    quoted = quote(log)
    assert quoted.startswith("jax.errors.JaxRuntimeError: INTERNAL: RET_CHECK")
    assert len(quoted) <= 400


def test_a_worker_that_dies_leaves_the_estimate_and_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = Request.of(
        RunConfig(model=MODEL, trainer={"train_batch_size": 4}), 100, Target(shape=(1,)), ("train",), True
    )
    estimate = {"estimate": {"total": 1}, "device": "cpu", "devices": 1, "mesh": {}, "advice": []}
    script = (
        "import os, signal, sys, pathlib; pathlib.Path(sys.argv[-1], 'estimate.json').write_text("
        f"{json.dumps(estimate)!r}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    real = subprocess.Popen
    monkeypatch.setattr(
        answers.subprocess, "Popen", lambda command, **more: real([sys.executable, "-c", script, *command[3:]], **more)
    )
    found = answers.ask(asked, 60.0)
    assert found.estimate == estimate
    assert "killed" in found.failure
    assert found.fits(0.5) is False
    assert found.fits(None) is None


def test_a_corrupt_answer_counts_as_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(answers, "_running", forked_worker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = replace(Request.of(RunConfig(model=MODEL), 100, Target(shape=(1,)), ("train",), True), compile=False)
    first = answers.ask(asked, 60.0)
    assert not first.from_cache
    assert answers.ask(asked, 60.0).from_cache
    path = answers.cache_folder() / asked.key / "estimate.json"
    for text in ("", '{"a"', "[]", "{}"):
        path.write_text(text)
        assert answers._read(path.parent, ()) is None
    again = answers.ask(asked, 60.0)
    assert not again.from_cache
    assert again.estimate == first.estimate
    (path.parent / "train.hlo.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"corrupt and has been deleted; run the command again"):
        answers.read_hlo(asked, "train")
    assert answers.read_hlo(asked, "train") is None


@pytest.mark.long
def test_plans_work_without_a_writable_cache(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(answers, "_running", forked_worker)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked = Request.of(RunConfig(model=MODEL), 100, Target(shape=(1,)), ("train",), False)
    assert answers.ask(asked, 60.0).estimate["devices"] == 1
    assert str(tmp_path / "file") in capfd.readouterr().err


def test_sigterm_kills_the_worker_too_and_leaves_no_files(tmp_path):
    """Job launchers and `timeout` send it."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "lmtrain", "plan", *SMALL, "--devices", "2"]
    process = subprocess.Popen(command, env=variables, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not (folders := list(tmp_path.glob("lmtrain-plan-*/log.txt"))):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=300) == 128 + signal.SIGTERM
    assert not folders[0].parent.exists()
    workers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(path)]
    assert workers == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has exited
        return b""


def test_of_equally_fast_settings_the_one_with_less_memory_is_kept(monkeypatch):
    """Offloading costs no time here and halves the memory, so that more sequences fit, which saves time."""

    def compiler(asked: Request, timeout, progress=lambda text: None) -> Answer:
        config = asked.run_config
        size = config.trainer.per_device_parallelism
        size = parallelisms(asked)[0] if size == -1 else size
        peak = float(size if config.model.gradient_checkpointing == "offload" else 2 * size)
        estimate = {"estimate": {"total": peak}, "device": "h100"}
        if not asked.compile:
            return Answer(estimate)
        return Answer(estimate, {"train": {"memory": {"peak": peak}, "seconds": {"total": 12.0 / size}}})

    monkeypatch.setattr("lmtrain.plan.search.ask", compiler)
    best = find_settings(request(), 12.0, 1.0, 60.0, lambda text: None, lambda text: None, Search()).best
    assert best is not None
    assert best.changes["model.gradient_checkpointing"] == "offload"
    assert best.changes["trainer.per_device_parallelism"] == 12
