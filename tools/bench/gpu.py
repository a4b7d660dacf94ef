"""Benchmarks and checks on one GPU, at most nine minutes: prints one section for deploy/performance.md.

    python tools/bench/gpu.py [--report FILE] [PART ...]
    python tools/bench/gpu.py --dry-run               the same code with nano sizes on any device, a minute on a CPU

| part | what | seconds at most |
| --- | --- | --- |
| attention | each backend: correct against float32, and its time against its bound | 115 |
| gpt2 | the loss and the step of GPT-2 124M; PyTorch, eager and compiled; published figures of llm.c | 170 |
| llama | the step of a 1B Llama; published figures of torchtitan and MaxText | 110 |
| resume | a run that is killed and resumed ends with the same bits | 90 |
| curves | the loss curve of a float32 model, compared with the CPU's | 45 |

The parts are also the names for PART; default: all. Each runs in a process of its own, which is killed when its time
is used up. Before that, at three quarters, it stops repeating measurements. A part that fails is reported, and the
others continue. The exit code is 1 if anything is wrong. Use one GPU of a machine that does nothing else; PyTorch is
compared if it is installed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from on_gpu.report import report  # noqa: E402
from on_gpu.results import Result, Verdict, read_results  # noqa: E402

SECONDS = {"attention": 115, "gpt2": 170, "llama": 110, "resume": 90, "curves": 45}
# Of the first GPU, memory as it is needed: parts with several processes or frameworks share it.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*SECONDS, []], metavar="PART", help=f"of: {' '.join(SECONDS)}")
    parser.add_argument("--dry-run", action="store_true", help="nano sizes, on any device; the times mean nothing")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the report to FILE instead of printing it")
    flags = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **os.environ})
    if not any(name in os.environ for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs, as Ctrl-C does
    began = time.monotonic()
    device = find_device()
    if device["platform"] != "gpu" and not flags.dry_run:
        parser.error(f"no GPU found, only {device['kind']}; --dry-run runs on any device")
    results: list[Result] = []
    for name in flags.parts or SECONDS:
        results += run_part(name, SECONDS[name], flags.dry_run)
    text = report(device, results, time.monotonic() - began, flags.dry_run)
    if flags.report:
        flags.report.write_text(text)
    else:
        print(text)
    wrong = [result for result in results if isinstance(result, Verdict) and not result.passed]
    for verdict in wrong:
        print(f"WRONG: {verdict.name}: {verdict.text}", file=sys.stderr)
    return 1 if wrong else 0


def find_device() -> dict[str, str]:
    """Platform and kind of JAX's first device, found by another process, since this one takes no memory of it."""
    code = """
import jax, json
from lmtrain.sharding.mesh import platform_of
print(json.dumps({"platform": platform_of(jax.devices()[0]), "kind": jax.devices()[0].device_kind}))
"""
    return json.loads(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)


def run_part(name: str, seconds: float, dry: bool) -> list[Result]:
    """The results of a part, with a verdict that says so if it failed or took too long."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results.jsonl"), Path(folder, "log.txt")
        command = [sys.executable, HERE / "on_gpu" / "part.py", name, results, seconds, *(["--dry-run"] if dry else [])]
        with open(log, "w") as output:
            process = subprocess.Popen(
                list(map(str, command)), cwd=folder, stdout=output, stderr=output, start_new_session=True
            )
        problem = ""
        try:
            if code := process.wait(seconds):
                problem = f"ended with code {code}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            problem = f"did not end in {seconds:.0f} s"
        finally:
            end(process)
        found = read_results(results)
        print(f"{name}: {time.monotonic() - began:.0f} s {problem}", file=sys.stderr)
        if problem:
            print(log.read_text()[-4000:], file=sys.stderr)
            found.append(Verdict(name, False, problem))
    return found


def end(process: subprocess.Popen) -> None:
    """Kill what still runs of a part, with the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    return next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")[:300]


if __name__ == "__main__":
    sys.exit(main())
