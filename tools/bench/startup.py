"""Start-up times of commands.

    .venv/bin/python tools/bench/startup.py

Total times of `--help` and `config check`; time of `train gpt2_nano` from the start of the process to the metrics of
its first step, with a cold and with a warm compilation cache. Medians of several runs.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

LMTRAIN = [sys.executable, "-m", "lmtrain"]


def seconds(arguments: list[str], folder: str) -> float:
    began = time.perf_counter()
    subprocess.run([*LMTRAIN, *arguments], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def seconds_to_first_step(folder: str, run: str, config: str = "gpt2_nano") -> float:
    """Seconds from the start of the process to the first line of metrics, written after step 1."""
    command = [*LMTRAIN, "train", config, "--trainer.id", run, "--trainer.num_train_steps", "1000"]
    command += ["--trainer.jax_compilation_cache_dir", os.path.join(folder, "compiled")]
    log = Path(folder, "logs", f"{run}.metrics.jsonl")
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    while not (log.exists() and '"train/loss"' in log.read_text()):
        assert process.poll() is None, "training ended before its first step"
        time.sleep(0.02)
    took = time.perf_counter() - began
    process.kill()
    process.wait()
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (["--help"], ["config", "check", "gpt2_nano"]):
            took = [seconds(arguments, folder) for _ in range(7)]
            print(f"lmtrain {' '.join(arguments):<24} {median(took):5.2f} s", flush=True)
        seconds(["preprocess", "gpt2_nano"], folder)
        print(f"first step, cold cache           {seconds_to_first_step(folder, 'cold'):5.2f} s", flush=True)
        warm = [seconds_to_first_step(folder, f"warm{i}") for i in range(5)]
        print(f"first step, warm cache           {median(warm):5.2f} s  (of {', '.join(f'{t:.1f}' for t in warm)})")


if __name__ == "__main__":
    main()
