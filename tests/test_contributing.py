"""The page for contributors and the workflow name things that exist, and the workflow runs all parts of CI."""

import re
import runpy
from collections import Counter
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
RUNS = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


def test_every_folder_of_tests_outside_the_mirror_is_on_the_page():
    own = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and "__" not in path.name}
    packages = {path.name for path in (ROOT / "lmtrain").iterdir()}
    data = {"corpus", "hlo", "reference"}
    # tests/compiled mirrors a package and has further tests
    assert own - packages - data | {"compiled"} == set(re.findall(r"`tests/(\w+)` \|", PAGE))


def test_the_workflow_runs_all_parts_of_ci_on_every_supported_python():
    parts = [line.split("#")[0].strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    scripts = {part.split()[1] for part in parts if re.match(r"(bash|\.venv/bin/python) tools/", part)}
    assert scripts - {"tools/install.sh"} == {run.split()[1] for run in RUNS}
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()) or ["3.11", "3.12", "3.13"]
    assert WORKFLOW["jobs"]["tests"]["strategy"]["matrix"]["python"] == supported


def test_more_files_than_the_budget_are_reported():
    over_budget = runpy.run_path(str(ROOT / "tools" / "size.py"))["over_budget"]
    files, lines = Counter({"data": 3, "tests": 9}), Counter({"data": 100, "tests": 500})
    assert over_budget(files, lines, {"files": 3, "lines": 100, "test_lines": 500}) == []
    (found,) = over_budget(files, lines, {"files": 2, "lines": 100, "test_lines": 500})
    assert "files: 3" in found
