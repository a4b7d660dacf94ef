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
from on_gpu.results import Table, Verdict, read_results, write_result  # noqa: E402

TABLES = {
    "Attention of one layer of nano, ": "| backend | documents | error | ms | TFLOP/s | bound, ms | limited by | share",
    "Attention of one layer of nano with grouped heads, ": "| backend | documents | error | ms | TFLOP/s | bound, ms |",
    "Loss and its gradients: ": "| ms | TFLOP/s | share of the peak |",
    "Steps of GPT-2 124M: ": "| system | device | ms | tokens/s | MFU | MFU, causal | attention | memory, GiB | bound",
    "Steps of a 1B Llama: 2 layers, length 32, documents not kept apart, as by the peers": "| system | note | device |",
    "Steps of a 1B Llama: 2 layers, length 32, documents kept apart": "| system | note | device | ms | tokens/s | MFU",
    "A run killed and resumed against an undisturbed one: ": "| steps | killed after step | arrays | differences |",
    "Losses in float32 on this device and on the CPU": "| steps | loss | on the CPU | largest difference | tolerance |",
}
ROWS = [
    *("| blockwise | 4 | ", "| xla | 1 | "),
    *("| lmtrain | this one | ", "| lmtrain, documents not kept apart | this one | "),
    *(
        "| PyTorch, eager | this one | ",
        "| PyTorch, compiled | this one | ",
        "| llm.c, published | 8 x H100 |  | 475,000 |",
    ),
    *("| lmtrain, 64 sequence(s), gradient_checkpointing false | does not fit: ", "| lmtrain, 2 sequence(s), "),
    *("| torchtitan, published: ", "| MaxText, published: "),
]


@pytest.mark.long
@pytest.mark.end_to_end
def test_a_dry_run_has_every_table_and_verdict(tmp_path):
    command = [sys.executable, TOOL, "--dry-run", "--report", tmp_path / "report.md"]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.md").read_text()
    for title, columns in TABLES.items():
        table = text.partition(f"\n{title}")[2].partition(":\n\n")[2]
        assert table.startswith(columns), title
    assert [row for row in ROWS if f"\n{row}" not in text] == []
    assert [name for name in ("attention", "resume", "curves") if f"\n| {name} | passed | " not in text] == []
    assert "failed" not in text
    assert "WRONG" not in text


def test_without_a_gpu_only_a_dry_run_starts(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_device", lambda: {"platform": "cpu", "kind": "cpu"})
    assert start(monkeypatch, "resume") == 2
    assert "--dry-run" in capsys.readouterr().err


def start(monkeypatch, *arguments):
    """Run the tool within this process, which keeps its environment and handlers. -> the exit code"""
    monkeypatch.setattr(gpu.os, "environ", {})
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    try:
        return gpu.main()
    except SystemExit as ended:
        return ended.code


def test_a_part_that_fails_or_takes_too_long_is_reported(capfd):
    assert gpu.run_part("missing", 60, True) == [
        Verdict("missing", False, "ended with code 1: ModuleNotFoundError: No module named 'on_gpu.missing'")
    ]
    assert gpu.run_part("attention", 0.1, True) == [Verdict("attention", False, "did not end in 0 s")]


def test_something_wrong_is_printed_and_the_exit_code_is_1(monkeypatch, capsys):
    found = {
        "resume": [Verdict("resume", False, "losses differ from step 7 on")],
        "curves": [Table("Losses", [{"a": 1}])],
    }
    monkeypatch.setattr(gpu, "find_device", lambda: {"platform": "gpu", "kind": "NVIDIA H100"})
    monkeypatch.setattr(gpu, "run_part", lambda name, seconds, dry: found[name])
    assert start(monkeypatch, "resume", "curves") == 1
    printed = capsys.readouterr()
    assert printed.err == "WRONG: resume: losses differ from step 7 on\n"
    assert printed.out.startswith("### NVIDIA H100, ")
    assert "\n| resume | WRONG | losses differ from step 7 on |\n\nLosses:\n\n| a |\n| --- |\n| 1 |\n" in printed.out


def test_wrong_attention_is_not_passed():
    assert attention.judge({"triton": 0.003}).passed
    for errors in ({"triton": 0.5, "xla": 0.001}, {"triton": math.nan}, {}):
        assert not attention.judge(errors).passed


def test_the_work_of_attention_is_that_of_its_documents():
    shape = attention.Shape("", 2, 4, 2, 8, 16)
    flops, size = attention.work(shape, None)
    assert flops == 3.5 * 4 * 2 * 4 * 36 * 16  # 36 pairs of a query and a key that it sees
    assert size == 2 * (6 * 2 * 4 * 8 * 16 + 6 * 2 * 2 * 8 * 16)
    halves = attention.jnp.array([[0] * 4 + [1] * 4] * 2)
    assert attention.work(shape, halves)[0] == flops * 20 / 36


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


def test_results_outlive_a_process_that_is_killed_while_it_writes(tmp_path):
    results = [Table("t", [{"ms": 1.5}]), Verdict("v", True, "x")]
    for result in results:
        write_result(tmp_path / "r", result)
    with open(tmp_path / "r", "a") as file:
        file.write('{"table": {"ti')
    assert read_results(tmp_path / "r") == results
    assert read_results(tmp_path / "missing") == []
