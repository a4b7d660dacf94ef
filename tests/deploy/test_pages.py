"""The pages and scripts of all targets. What holds for all pages of the repository is in tests/test_guides.py."""

import re

from deploy.scripts import DEPLOY, blocks, needs, shellcheck

from lmtrain.runtime.signals import STOPPED_BY_SIGNAL


def test_commands_on_the_pages_state_what_they_need():
    assert all(needs(before) for page in DEPLOY.rglob("*.md") for before, _ in blocks(page))


def test_shell_scripts_are_clean():
    scripts = [
        path for folder in ("gpu", "slurm", "tpu") for path in (DEPLOY / folder).iterdir() if path.suffix != ".md"
    ]
    assert len(scripts) == 11
    shellcheck(*sorted(scripts))


def test_the_exit_code_of_a_stop_is_the_documented_one():
    rows = re.findall(r"^\| ([\d, a-z]+) \| (.*?) \|", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    documented = dict(rows)
    assert "saved" in documented[str(STOPPED_BY_SIGNAL)]
    assert {"0", "2"} <= documented.keys()
