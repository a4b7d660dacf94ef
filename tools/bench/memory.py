"""Memory of `lmtrain preprocess` with one worker: for a large file, and for one document of 50 MB.

    .venv/bin/python tools/bench/memory.py [GIGABYTES]

The file is the demo corpus's text, repeated to GIGABYTES (default 1), as one uncompressed .jsonl; it is read in parts
of 256 MB. Prints the peak resident size of the parent and of the largest worker.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time

from lmtrain.data.config import DataConfig
from lmtrain.preprocess.documents import read_texts
from lmtrain.preprocess.input_files import expand_urls
from lmtrain.preprocess.prepare_demo import prepare_demo


def main() -> None:
    size = float(sys.argv[1]) * 1e9 if len(sys.argv) > 1 else 1e9
    with tempfile.TemporaryDirectory() as folder:
        demo = DataConfig(demo=os.path.join(folder, "demo"))
        prepare_demo(demo)
        texts = [text for file in expand_urls(demo.urls("train")) for text in read_texts(file, "text")]
        large, long = os.path.join(folder, "large.jsonl"), os.path.join(folder, "long.jsonl")
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        with open(large, "wb") as file:
            while file.tell() < size:
                file.write(lines)
        whole = "\n".join(map(str, texts))
        document = (whole * (50_000_000 // len(whole) + 1))[:50_000_000]
        with open(long, "w") as file:
            file.write(json.dumps({"text": document}) + "\n")
        for name in (large, long):
            measure(name, demo.tokenizer, folder)


def measure(file: str, tokenizer: str, folder: str) -> None:
    name = os.path.basename(file)
    config = os.path.join(folder, "config.yaml")
    data = {"train_urls": [file], "tokenizer": tokenizer, "cache_dir": f"{file}.cache", "num_preprocess_workers": 1}
    with open(config, "w") as opened:
        json.dump({"data": data}, opened)
    process = subprocess.Popen([sys.executable, "-m", "lmtrain", "preprocess", config], stderr=subprocess.DEVNULL)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in [process.pid, *children(process.pid)]:
            peaks[pid] = max(peaks.get(pid, 0), peak_kilobytes(pid))
        time.sleep(0.1)
    parent = peaks.pop(process.pid) / 1e3
    size = os.path.getsize(file) / 1e6
    print(f"{name}: {size:,.0f} MB, worker {max(peaks.values()) / 1e3:,.0f} MB, parent {parent:,.0f} MB at most")
    assert process.returncode == 0


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            direct = [int(number) for number in file.read().split()]
        tasks = os.listdir(f"/proc/{pid}/task")
        for task in tasks:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                direct += [int(number) for number in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return sorted(set(direct))


def peak_kilobytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as file:
            found = re.search(r"VmHWM:\s+(\d+)", file.read())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
