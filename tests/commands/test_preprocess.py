"""`lmtrain preprocess`: what it lists before it builds, and what it logs afterwards."""

import signal

import pytest
from conftest import TRAIN_FILES
from token_files import documents, nano_gpt

from lmtrain.runtime.progress import Progress


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


def test_reading_files_of_token_ids_shows_progress_and_stops_at_a_signal(run_cli, tmp_path, monkeypatch):
    names = ["a.bin", "b.bin"]
    for number, name in enumerate(names):
        nano_gpt(tmp_path / name, documents(number))
    (tmp_path / "tokens.yaml").write_text(
        "data: {train_urls: [a.bin, b.bin], format: {type: tokens}, tokenizer: byte, cache_dir: tokens}\n"
        "model: {type: gpt2, hidden_dim: 32, num_heads: 2, num_layers: 2, seq_len: 32}\n"
    )
    update, sizes = Progress.update, [(tmp_path / name).stat().st_size for name in names]
    read = []

    def stop_after_the_first(self, done, *text):
        update(self, done, *text)
        if self.label == "verify":
            read.append((done, self.total))
            if len(read) == 1:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Progress, "update", stop_after_the_first)
    stopped = run_cli("preprocess", "tokens.yaml", code=75).stderr
    assert f"verify {sizes[0] / 1024:.1f} KiB of {sum(sizes) / 1024:.1f} KiB, " in stopped
    assert "/s, " in stopped
    assert " left" in stopped
    run_cli("preprocess", "tokens.yaml", code=0)
    assert read == [(sizes[0], sum(sizes)), (sizes[1], sizes[1])]
    run_cli("preprocess", "tokens.yaml", code=0)
    assert len(read) == 2
