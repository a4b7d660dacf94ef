"""The generated parts of the guides and the golden resolved configs are up to date."""

import contextlib
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_guide_and_golden_configs_are_up_to_date(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["config_guide.py", "--check"])
    with contextlib.suppress(SystemExit):
        runpy.run_path("tools/config_guide.py", run_name="__main__")
    assert capsys.readouterr().out == "up to date\n"


def test_there_is_a_golden_file_for_every_shipped_config_and_no_other():
    golden = {path.name for path in (ROOT / "tests" / "golden" / "configs").iterdir()}
    assert golden == {path.name for path in (ROOT / "configs").glob("*.yaml")}
