"""A run that is killed with SIGKILL at random moments and resumed ends with the bytes of an undisturbed run.

This runs tools/kill_fuzz.py, with fewer kills than its default of 50.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from faults.runs import finish, full_settings, names, run_folder, write_config

pytestmark = pytest.mark.end_to_end

TOOL = Path(__file__).parents[2] / "tools" / "kill_fuzz.py"


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kills"), [([], 4), (["--lora"], 3), (["--moe"], 2)])
def test_killed_at_random_moments_a_run_ends_with_the_same_bytes(tmp_path, kind, kills):
    command = [sys.executable, TOOL, "--kills", kills, "--steps", 60 * kills, "--seed", 1, "--folder", tmp_path, *kind]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n{kills} kills; most lost " in done.stdout


@pytest.mark.long
def test_temporary_files_of_a_killed_process_are_deleted_at_the_next_start(tmp_path):
    """Small files are written as `<name>.tmp-<process>` and renamed: a kill in between leaves the temporary file."""
    write_config(tmp_path, full_settings(steps=2))
    temporary = [
        run_folder(tmp_path) / "attempt.json.tmp-1",
        run_folder(tmp_path) / "step-1.partial.tmp-1",
        tmp_path / "logs" / "one" / "config.yaml.tmp-1",
        tmp_path / "cache" / "train" / "manifest.json.tmp-1",
        tmp_path / "exports" / "one" / "step-1.tmp-1" / "config.json",
        tmp_path / "logs" / "one.metrics.jsonl.tmp-1",
    ]
    for path in temporary:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{")
    of_another_run = tmp_path / "logs" / "two.metrics.jsonl.tmp-1"
    of_another_run.write_text("{")
    finish(tmp_path)
    assert of_another_run.exists()
    of_another_run.unlink()
    assert [name for name in sorted(names(tmp_path)) if ".tmp" in name] == []
