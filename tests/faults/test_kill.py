"""A run that is killed with SIGKILL at random moments and resumed ends with the bytes of an undisturbed run.

This runs tools/kill_fuzz.py, with fewer kills than its default of 50.
"""

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
from faults.runs import finish, full_settings, names, run_folder, write_config

pytestmark = pytest.mark.end_to_end

SPEC = importlib.util.spec_from_file_location("kill_fuzz", Path(__file__).parents[2] / "tools" / "kill_fuzz.py")
kill_fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(kill_fuzz)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kills"), [([], 3), (["--lora"], 2), (["--moe"], 2)])
def test_killed_at_random_moments_a_run_ends_with_the_same_bytes(tmp_path, monkeypatch, capsys, kind, kills):
    """Within this process, which starts and kills the runs."""
    arguments = ["--kills", kills, "--steps", 60 * kills, "--seed", 1, "--folder", tmp_path, *kind]
    monkeypatch.setattr(sys, "argv", ["kill_fuzz.py", *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # that of this process stays
    code, printed = kill_fuzz.main(), capsys.readouterr().out
    assert code == 0, printed
    assert f"\n{kills} kills; most lost " in printed


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
