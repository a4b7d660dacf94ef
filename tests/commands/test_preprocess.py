"""`lmtrain preprocess`: what it lists before it builds, and what it logs afterwards."""

import pytest
from conftest import TRAIN_FILES


@pytest.fixture(autouse=True)
def _config(settings, write_config):
    settings["data"]["num_preprocess_workers"] = 1
    write_config(settings)


def test_a_dry_run_lists_the_shards_that_are_missing_and_writes_nothing(run_cli, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    shown = run_cli("preprocess", "tiny.yaml", "--dry-run", code=0).stdout
    assert sorted(tmp_path.rglob("*")) == before
    assert "cache/train: 3 of 3 shards to build" in shown
    assert f"  shard-00001-of-00003 <- {TRAIN_FILES[1]} (" in shown
    assert "cache/validation: 1 of 1 shard to build" in shown
    assert "on 1 local process" in shown
    logged = run_cli("preprocess", "tiny.yaml", code=0).stderr
    assert "cache/train: complete, " in logged
    assert "one epoch is " in logged
    assert " of 4 sequences of 32 tokens" in logged
    shown = run_cli("preprocess", "tiny.yaml", "--dry-run", code=0).stdout
    assert shown == "cache/train: complete, nothing to do\ncache/validation: complete, nothing to do\n"


def test_a_dry_run_with_a_missing_demo_says_what_is_made_first(run_cli, tmp_path):
    (tmp_path / "demo.yaml").write_text("data: {demo: corpus, cache_dir: cache}\n")
    shown = run_cli("preprocess", "demo.yaml", "--dry-run", code=0).stdout
    assert shown == (
        "corpus: the demo corpus and its tokenizer will be created first; the shards are not known before\n"
    )


def test_listing_and_showing_exclude_each_other(run_cli):
    done = run_cli("preprocess", "tiny.yaml", "--show", "1", "--dry-run", code=2)
    assert "argument --dry-run: not allowed with argument --show" in done.stderr
