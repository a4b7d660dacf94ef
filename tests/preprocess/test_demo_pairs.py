"""tools/demo_pairs.py: pairs of real lines that follow and lines of another place."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools/demo_pairs.py"


def run(folder):
    return subprocess.run([sys.executable, TOOL, "demo"], cwd=folder, capture_output=True, text=True)


def test_the_chosen_lines_follow_the_prompt_and_the_same_demo_gives_the_same_bytes(tmp_path):
    (tmp_path / "demo").mkdir()
    lines = [f"line {number}\n" for number in range(30_000)]
    for name in ("train.1-of-8.jsonl.gz", "validation.jsonl.gz"):
        with gzip.open(tmp_path / "demo" / name, "wt") as file:
            file.write(json.dumps({"text": "\n".join(lines)}) + "\n")
    made = []
    for _ in range(2):
        done = run(tmp_path)
        assert done.returncode == 0, done.stderr
        made.append((tmp_path / "demo" / "pairs.train.jsonl").read_bytes())
    assert made[0] == made[1]
    rows = [json.loads(row) for row in made[0].decode().splitlines()]
    assert len(rows) == 4000
    assert len((tmp_path / "demo" / "pairs.validation.jsonl").read_text().splitlines()) == 200
    apart = 0
    for row in rows:
        last, first = (int(row[name].splitlines()[at].split()[1]) for name, at in (("prompt", -1), ("chosen", 0)))
        assert first == last + 1
        apart += row["rejected"] != row["chosen"]
    assert apart > 3900


def test_a_missing_demo_is_one_message(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert "`lmtrain preprocess configs/llama_nano.yaml` makes the demo" in done.stderr
