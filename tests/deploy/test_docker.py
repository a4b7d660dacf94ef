"""deploy/docker: hadolint passes, images are small, pinned and unprivileged, and the install steps work."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_settings
from deploy.scripts import BIN, DEPLOY, ROOT
from faults.runs import write_config

DOCKER = DEPLOY / "docker"
FILES = ["Dockerfile.gpu", "Dockerfile.tpu"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of each line, with continued lines joined and without comments."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines()]


def arguments(name: str, instruction: str) -> list[str]:
    return [rest for word, rest in instructions(name) if word == instruction]


def test_hadolint_finds_nothing():
    done = subprocess.run(
        [BIN / "hadolint", "--no-color", *(DOCKER / name for name in FILES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_the_image_is_pinned_without_privileges_and_starts_lmtrain(name):
    bases = [base.split(" AS ")[0] for base in arguments(name, "FROM")]
    assert len(bases) == 2  # build tools stay in the first stage
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base) for base in bases)
    assert all(tuple(map(int, re.findall(r"\d+", base)[:2])) == sys.version_info[:2] for base in bases)
    last = instructions(name)[[word for word, _ in instructions(name)].index("FROM", 1) :]
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/lmtrain /opt/lmtrain"]
    assert not any("install" in rest for word, rest in last if word == "RUN")
    assert arguments(name, "USER") == ["1000"]
    assert arguments(name, "ENTRYPOINT") == ['["lmtrain"]']
    assert not re.search(r"API_KEY|TOKEN", (DOCKER / name).read_text())
    installs = re.findall(r"pip install [^&]*", arguments(name, "RUN")[0])
    assert len(installs) == 2
    assert all("--constraint tools/constraints.txt" in install for install in installs)


def travels(path: str) -> bool:
    """Whether .dockerignore includes a path: the last pattern that matches it or a parent decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    parents = [path, *map(str, Path(path).parents)]
    keep = True
    for line in lines:
        pattern = line.removeprefix("!")
        names = [part for parent in parents for part in (parent, Path(parent).name)] if "**" in pattern else parents
        if any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for name in names):
            keep = line.startswith("!")
    return keep


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """The build context: the files sent to the builder."""
    folder = tmp_path_factory.mktemp("context")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    for path in filter(travels, tracked):
        if (ROOT / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    return folder


def test_the_context_has_what_is_copied_and_nothing_private_or_unneeded(context):
    private = (".git/config", ".venv/bin/python", "secrets.env", "tests/conftest.py", "lmtrain/__pycache__/cli.pyc")
    assert not any(map(travels, private))
    assert sorted(path.name for path in context.iterdir()) == [
        *("LICENSE", "README.md", "configs", "lmtrain", "pyproject.toml", "tools"),
    ]
    copied = [source for name in FILES for rest in arguments(name, "COPY")[:-1] for source in rest.split()[:-1]]
    assert [source for source in copied if not (context / source).exists()] == []


@pytest.mark.long
def test_the_install_step_creates_an_environment_that_runs(context, tmp_path):
    """The step of both images, without the accelerator's extra, whose wheels are gigabytes: see test_gpu.py. Here files
    that uv has downloaded before are used, and nothing is compiled to bytecode in advance."""
    gpu, tpu = (arguments(name, "RUN")[0] for name in FILES)
    step = gpu.replace("${CUDA},ray", "ray")
    assert step == tpu.replace("tpu,ray", "ray") != gpu  # the steps differ in the extra only
    folder = tmp_path / "src"
    shutil.copytree(context, folder)
    # a separate Python, like that of the base image, into which `pip install` installs
    subprocess.run([sys.executable, "-m", "venv", folder / "python"], check=True)
    environment = os.environ | {"PATH": f"{folder / 'python' / 'bin'}:{os.environ['PATH']}"}
    environment["XDG_CACHE_HOME"] = str(Path.home() / ".cache")
    step = (
        step.replace("--no-cache ", "")
        .replace("--compile-bytecode ", "")
        .replace("/opt/lmtrain", str(tmp_path / "lmtrain"))
    )
    command = ["bash", "-euc", step]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder)  # nothing may depend on the build stage
    installed = tmp_path / "lmtrain" / "bin"
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    write_config(tmp_path, tiny_settings())
    for command in (["--help"], ["config", "check", "gpt2_nano"], ["plan", "tiny.json"]):
        ran = subprocess.run([installed / "lmtrain", *command], cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert ran.returncode == 0, (command, ran.stderr)
