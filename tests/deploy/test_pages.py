"""The pages for people name what exists: files, scripts, exit codes, settings."""

import re

import pytest
from deploy.scripts import DEPLOY, ROOT, blocks, needs

from lmtrain.config.describe import describe
from lmtrain.run.config import RunConfig
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL

PAGES = [ROOT / "README.md", ROOT / "configs" / "README.md", ROOT / "lmtrain" / "models" / "README.md"]
PAGES += sorted(DEPLOY.rglob("README.md"))
SETTINGS = {setting.name for group in describe(RunConfig) for setting in group.settings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_that_are_named_exist(page):
    named = re.findall(r"`((?:deploy|tools|tests|lmtrain|configs)/[\w./-]+\w)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists() and "mine" not in name]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_in_full_exist(page):
    named = set(re.findall(r"`(?:--)?((?:trainer|data|model|optimizer)\.[a-z_.]+[a-z])\b", page.read_text()))
    sections = {name.rpartition(".")[0] for name in SETTINGS} | {name.replace("[]", "") for name in SETTINGS}
    names = {name.removesuffix(".type") for name in named if not name.endswith(".py")}
    unknown = names - SETTINGS - sections
    assert unknown - {"trainer.wandb", "trainer.batch_size", "trainer.eval_per_device_parallelism"} == set()


def test_the_page_for_all_targets_has_no_command_that_needs_one():
    assert all(needs(before) for before, _ in blocks(DEPLOY / "README.md"))


def test_the_exit_code_of_a_stop_is_the_one_that_is_told():
    rows = re.findall(r"^\| ([\d, a-z]+) \| (.*?) \|", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    told = dict(rows)
    assert "saved" in told[str(STOPPED_BY_SIGNAL)]
    assert {"0", "2"} <= told.keys()
