"""The page for all targets. What holds for all pages is in tests/test_guides.py."""

import re

from deploy.scripts import DEPLOY, blocks, needs

from lmtrain.runtime.signals import STOPPED_BY_SIGNAL


def test_the_page_for_all_targets_has_no_command_that_needs_one():
    assert all(needs(before) for before, _ in blocks(DEPLOY / "README.md"))


def test_the_exit_code_of_a_stop_is_the_one_that_is_told():
    rows = re.findall(r"^\| ([\d, a-z]+) \| (.*?) \|", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    told = dict(rows)
    assert "saved" in told[str(STOPPED_BY_SIGNAL)]
    assert {"0", "2"} <= told.keys()
