"""Fixtures: checkpoints with placeholder files instead of arrays."""

import os
from collections.abc import Callable, Iterator

import pytest

from lmtrain.checkpoint.config import Kind
from lmtrain.checkpoint.discovery import Checkpoint, step_folder
from lmtrain.checkpoint.manifest import Manifest, record_files, write_manifest
from lmtrain.runtime.storage import delete_folder, join, write_bytes


@pytest.fixture(params=["path", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path) -> Iterator[str]:
    """A folder that does not exist yet: at a local path, then at a URL."""
    path = str(tmp_path / "run") if request.param == "path" else f"memory://{tmp_path}/run"
    yield path
    delete_folder(path)


@pytest.fixture
def put() -> Callable[..., str]:
    """`put("a", "b", "name")` writes a file that contains its name, and creates the folders above it."""

    def write(folder: str, *names: str, content: bytes | None = None) -> str:
        path = join(folder, *names)
        if "://" not in path:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        write_bytes(path, names[-1].encode() if content is None else content)
        return path

    return write


@pytest.fixture
def make_checkpoint(put) -> Callable[..., Checkpoint]:
    """`make_checkpoint(folder, 5)` creates a complete checkpoint with the parts `params` and `optimizer`."""

    def make(folder: str, step: int, kind: Kind = Kind.PERMANENT) -> Checkpoint:
        path = step_folder(folder, step)
        names = ["run.json", "params/d/a", "optimizer/a"]
        for name in names:
            put(path, *name.split("/"), content=f"{name} of {step:9}".encode())
        write_manifest(path, Manifest(step=step, kind=kind, saved=1.5, files=record_files(path, names)))
        return Checkpoint(step, path)

    return make
