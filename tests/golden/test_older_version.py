"""A config, a token cache and a checkpoint that commit 5ef9020 wrote: see "Versions" in .github/CONTRIBUTING.md."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from conftest import logged, run_in_process

from lmtrain.data import batches
from lmtrain.data.windows import windows_of

RUN = "old-98406a"  # as that commit named it


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(Path(__file__).parent / "version_5ef9020.tar.gz") as file:
        file.extractall(folder, filter="data")
    return folder


def test_its_checkpoint_has_the_same_loss(written, monkeypatch):
    """On the sequences of that commit, which did not overlap."""
    monkeypatch.setattr(batches, "windows_of", lambda store, seq_len, evaluates: windows_of(store, seq_len))
    then = logged(written, "eval/loss", RUN)[4]
    done = run_in_process(["eval", "old.yaml"], written, code=0)
    assert f"run {RUN}, step 4" in done.stderr
    assert json.loads(done.stdout)["eval/loss"] == pytest.approx(then, abs=1e-4)


def test_its_run_resumes_with_its_cache(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "older")
    before = {path.name: path.read_bytes() for path in (folder / "cache" / "train").iterdir()}
    flags = ["--trainer.num_train_steps", "6", "--trainer.jax_compilation_cache_dir", "null"]
    done = run_in_process(["train", "old.yaml", *flags], folder, code=0)
    assert f"resuming after step 4 from {folder}/checkpoints/{RUN}/step-4" in done.stderr
    assert (folder / "checkpoints" / RUN / "step-6" / "manifest.json").exists()
    assert {path.name: path.read_bytes() for path in (folder / "cache" / "train").iterdir()} == before
