"""The pictures of the pages are up to date, small, linked from a page, and not packaged."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "configs" / "guide" / "pictures"
TOOL = runpy.run_path(str(ROOT / "tools" / "pictures.py"))
PAGES = [ROOT / "README.md", *(ROOT / "configs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]


@pytest.mark.long
def test_pictures_are_up_to_date():
    check = [sys.executable, "tools/pictures.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pictures_are_small_load_nothing_and_are_linked_from_a_page():
    linked = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]+\]\(([^)#]+)\)", page.read_text())
    }
    assert {path.name for path in PICTURES.iterdir()} == set(TOOL["DRAWN"])
    for path in PICTURES.iterdir():
        text = path.read_text()
        assert path.stat().st_size < 60_000
        assert path in linked, f"no page shows {path.name}"
        assert not re.findall(r"(?:href|src)=\"(?!#)|url\((?!\"?#)|@import|<script", text)


def test_a_changed_picture_is_noticed_and_a_rounding_difference_is_not():
    is_same = TOOL["is_same"]
    stored = '<path d="M 10.123456 20"/><text>17 %</text>'
    assert is_same(stored, stored.replace("10.123456", "10.12345"))
    assert not is_same(stored, stored.replace("10.123456", "10.223456"))
    assert not is_same(stored, stored.replace("17", "18"))
    assert not is_same(stored, stored.replace("path", "line"))
    assert not is_same(stored, stored.replace("M 10.123456", "M 10.123456 L 3.123456"))


def test_pictures_are_in_neither_wheel_nor_sdist():
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert "/configs/guide" in targets["wheel"]["exclude"]
    assert "/configs/guide/pictures" in targets["sdist"]["exclude"]
