"""Workers of the planner: their failures, their cache, and their end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plan.workers import forked_worker, local_request

from lmtrain.plan import request
from lmtrain.plan.request import Plan, quote
from lmtrain.runtime.errors import UserError


def test_without_compiled_steps_it_is_unknown_whether_a_state_that_fits_is_enough():
    plan = Plan({"state": {"params": 2, "optimizer": 4}})
    assert [plan.fits(capacity) for capacity in (5, 6, None)] == [False, None, None]
    compiled = Plan(plan.program, {"train": {"memory": {"peak": 8}}, "eval": {"memory": {"peak": 9}}})
    assert [compiled.fits(capacity) for capacity in (8, 9, None)] == [False, True, None]
    refused = Plan(plan.program, {"train": {"does_not_fit": "too large"}})
    assert [refused.fits(capacity) for capacity in (100, None)] == [False, False]


def test_errors_of_a_failed_compiler_are_shortened():
    log = (
        "Jax plugin configuration error: noise\nTraceback (most recent call last):\n  File x\n    code\n"
        "W0000 00:00 noise\njax.errors.JaxRuntimeError: INTERNAL: RET_CHECK failure (a.cc:1) it broke " + "x" * 900
    )
    quoted = quote(log)
    assert quoted.startswith("jax.errors.JaxRuntimeError: INTERNAL: RET_CHECK")
    assert len(quoted) <= 400


@pytest.mark.parametrize(
    ("number", "failure"),
    [
        ("SIGKILL", "was killed (SIGKILL), probably because this machine ran out of memory"),
        ("SIGABRT", "cannot compile this program and aborted (SIGABRT): Check failed: kind == kMixed (1 vs. 2)"),
    ],
)
def test_a_worker_that_dies_leaves_its_first_part_and_a_reason(monkeypatch, tmp_path, number, failure):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = {"state": {"params": 1}, "device": "cpu", "devices": 1, "mesh": {}, "advice": []}
    stack = "F1125 10:00 rewrites.cc:7] Check failed: kind == kMixed (1 vs. 2)\n@ 0x7f a\n@ 0x7f b\n@ 0x7f c\n@ 0x7f d"
    script = (
        "import os, signal, sys, pathlib; pathlib.Path(sys.argv[-1], 'program.json').write_text("
        f"{json.dumps(program)!r}); print({stack!r}, flush=True); os.kill(os.getpid(), signal.{number})"
    )
    real = subprocess.Popen
    monkeypatch.setattr(
        request.subprocess, "Popen", lambda command, **more: real([sys.executable, "-c", script, *command[3:]], **more)
    )
    plan = request.ask(local_request(True, train_batch_size=4), 60.0)
    assert plan.program == program
    assert plan.failure.endswith(failure)


def test_a_corrupt_answer_counts_as_missing(monkeypatch, tmp_path):
    started = []

    def worker(*arguments):
        started.append(arguments)
        return forked_worker(*arguments)

    monkeypatch.setattr(request, "_running", worker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = local_request(False)
    first = request.ask(asked, 60.0)
    assert request.ask(asked, 60.0) == first
    assert len(started) == 1
    path = request.cache_folder() / asked.key / "program.json"
    for text in ("", '{"a"', "[]", "{}"):
        path.write_text(text)
        assert request._read(path.parent, ()) is None
    assert request.ask(asked, 60.0) == first
    assert len(started) == 2
    (path.parent / "train.hlo.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match=r"corrupt and has been deleted; run the command again"):
        request.read_hlo(asked, "train")
    assert request.read_hlo(asked, "train") is None


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/lmtrain/plans: plans cannot be cached: .* set XDG_CACHE_HOME"):
        request.ask(local_request(False), 60.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_worker_too_and_leaves_no_files(tmp_path, number):
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "lmtrain", "plan", "gpt2_nano", "--data.tokenizer", "gpt2", "--devices", "2"]
    process = subprocess.Popen(command, env=variables, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not (folders := list(tmp_path.glob("lmtrain-plan-*/log.txt"))):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=300) == 75
    assert not folders[0].parent.exists()
    workers = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(path)]
    assert workers == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has exited
        return b""
