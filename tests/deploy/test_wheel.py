"""What a person installs: the wheel and the source archive, built from a checkout and used in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploy.scripts import BIN, ROOT


def call(*command: object, folder: Path) -> str:
    """Run a command without anything of this environment. -> its output"""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "UV_"))}
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "UV_CACHE_DIR": str(Path.home() / ".cache" / "uv"), **kept}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=clean, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.release  # an installation of its own; the image's installs a wheel in CI
def test_the_wheel_trains_exports_and_generates_in_an_empty_folder(tmp_path):
    source, empty = tmp_path / "source", tmp_path / "empty"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for path in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / path).is_file():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / path)
    call(BIN / "uv", "build", "-q", "--python", sys.executable, "--out-dir", "dist", folder=source)
    built = sorted((source / "dist").glob("lmtrain-*"))
    assert [path.suffix for path in built] == [".whl", ".gz"]
    call(BIN / "uv", "tool", "run", "-q", "twine", "check", "--strict", *built, folder=source)
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "installed", folder=tmp_path)
    python = tmp_path / "installed" / "bin" / "python"
    constraints = ROOT / "tools" / "constraints.txt"
    call(BIN / "uv", "pip", "install", "-q", "--python", python, "-c", constraints, built[0], folder=tmp_path)
    shutil.rmtree(source)
    empty.mkdir()
    lmtrain = python.parent / "lmtrain"
    short = ["--trainer.num_train_steps", "20", "--trainer.tracker", "{type: json}"]
    call(lmtrain, "train", "gpt2_nano", *short, folder=empty)
    call(lmtrain, "export-hf", "gpt2_nano", *short, "--output", "exported", folder=empty)
    assert (empty / "exported" / "model.safetensors").exists()
    assert call(lmtrain, "generate", "--hf", "exported", "--prompt", "import", folder=empty).strip()
