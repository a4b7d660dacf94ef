"""The generated parts of the guides and the golden resolved configs are up to date."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_guide_and_golden_configs_are_up_to_date():
    check = [sys.executable, "tools/config_guide.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "up to date\n"


def test_there_is_a_golden_file_for_every_shipped_config_and_no_other():
    golden = {path.name for path in (ROOT / "tests" / "golden" / "configs").iterdir()}
    assert golden == {path.name for path in (ROOT / "configs").glob("*.yaml")}
