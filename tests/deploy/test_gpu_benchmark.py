"""tools/bench/gpu.py: a dry run has every table and verdict, and what is wrong is reported."""

import importlib.util
import math
import subprocess
import sys

import pytest
from deploy.scripts import ROOT

TOOL = ROOT / "tools" / "bench" / "gpu.py"
SPEC = importlib.util.spec_from_file_location("gpu", TOOL)
gpu = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu)

from on_gpu import attention, curves, resume  # noqa: E402  # gpu.py adds their folder to the path

TABLES = [
    *("Attention of one layer of nano, ", "Attention of one layer of nano with grouped heads, "),
    *("Loss and its gradients: ", "Steps of GPT-2 124M: "),
    "Steps of a 1B Llama: 2 layers, length 32, documents not kept apart, as by the peers",
    "Steps of a 1B Llama: 2 layers, length 32, documents kept apart",
    "A run killed and resumed against an undisturbed one: ",
    "Losses in float32 on this device and on the CPU",
]


@pytest.mark.long
@pytest.mark.end_to_end
def test_a_dry_run_has_every_table_and_verdict(tmp_path):
    command = [sys.executable, TOOL, "--dry-run", "--report", tmp_path / "report.md"]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.md").read_text()
    assert [line for line in TABLES if f"\n{line}" not in text] == []
    assert [name for name in ("attention", "resume", "curves") if f"\n| {name} | passed | " not in text] == []
    assert "failed" not in text
    assert "WRONG" not in text


def test_wrong_attention_is_not_passed():
    assert attention.judge({"triton": 0.003}).passed
    for errors in ({"triton": 0.5, "xla": 0.001}, {"triton": math.nan}, {}):
        assert not attention.judge(errors).passed


def test_curves_may_differ_by_rounding_that_grows_and_by_no_more():
    on_cpu = [5.0 - step / 50 for step in range(100)]
    assert curves.judge([loss * (1 + 1e-7 * 1.1**step) for step, loss in enumerate(on_cpu)], on_cpu).passed
    for changed, factor in ((0, 1 + 1e-4), (40, 1.01), (99, 1.1), (99, math.nan)):
        here = list(on_cpu)
        here[changed] *= factor
        assert not curves.judge(here, on_cpu).passed
    assert not curves.judge(on_cpu[:99], on_cpu).passed


def test_a_resume_that_differs_in_a_bit_or_a_step_is_found():
    expected = [(1, 5.0), (2, 4.0)]
    assert resume.differences(expected, expected, 2) == []
    assert resume.differences([(1, 5.0), (2, math.nextafter(4.0, 5))], expected, 2) == ["losses differ from step 2 on"]
    assert resume.differences([(1, 5.0), (1, 5.0), (2, 4.0)], expected, 2)
    assert resume.different({"a": b"0", "b": b"1"}, {"a": b"0", "b": b"2", "c": b""}) == ["b differs", "c differs"]
