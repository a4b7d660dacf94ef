"""deploy/gpu: the install lines resolve, and `train` starts one process, or one of several."""

import os
import re
import subprocess

import pytest
from deploy.scripts import BIN, DEPLOY, ROOT, blocks

GPU = DEPLOY / "gpu"
README = (GPU / "README.md").read_text()


@pytest.mark.parametrize(
    ("extra", "glibc", "plugins"),
    [
        ("cuda12", "2_28", ("jax-cuda12-plugin", "nvidia-cudnn-cu12")),
        pytest.param("cuda13", "2_28", ("jax-cuda13-plugin", "nvidia-cudnn-cu13"), marks=pytest.mark.long),
        # libtpu has no wheels for one before 2.31; the images have Debian 12 with 2.36
        pytest.param("tpu", "2_36", ("libtpu",), marks=pytest.mark.long),
    ],
)
def test_install_lines_resolve(extra, glibc, plugins):
    """For Linux on x86_64, with the versions of tools/constraints.txt. Not installed: the wheels are gigabytes."""
    assert extra == "tpu" or f'pip install -c tools/constraints.txt ".[{extra}]"' in README
    command = [BIN / "uv", "pip", "compile", "pyproject.toml", "--extra", extra, "-c", "tools/constraints.txt"]
    command += ["--extra", "ray", "--python-platform", f"x86_64-manylinux_{glibc}", "--no-header", "--no-annotate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    versions = dict(re.findall(r"^([\w-]+)==(\S+)", done.stdout, re.MULTILINE))
    constraints = (ROOT / "tools" / "constraints.txt").read_text()
    assert f"jax=={versions['jax']} " in constraints
    assert {"ray", *plugins} <= versions.keys()
    assert extra == "tpu" or versions[plugins[0]] == versions["jax"]


def sourced(program: str, **environment: str) -> subprocess.CompletedProcess:
    """The output of a shell after sourcing env.sh, without the flags of this process."""
    names = ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    script = f"set -euo pipefail; . '{GPU}/env.sh'; {program}"
    return subprocess.run(["bash", "-c", script], env=clean | environment, capture_output=True, text=True)


SHOW = 'echo "${XLA_CLIENT_MEM_FRACTION:-} ${XLA_PYTHON_CLIENT_MEM_FRACTION:-} ${XLA_FLAGS:-}"'


def test_variables_set_by_the_user_stay_and_the_image_has_the_same_settings():
    for given, expected in (
        ({}, "0.9  "),
        ({"XLA_FLAGS": "--xla_dump_to=x"}, "0.9  --xla_dump_to=x"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, " 0.6 "),  # jax refuses both
    ):
        twice = sourced(f". '{GPU}/env.sh'; {SHOW}", **given)
        assert sourced(SHOW, **given).stdout == twice.stdout == f"{expected}\n"
    assert "XLA_CLIENT_MEM_FRACTION=0.9\n" in (DEPLOY / "docker" / "Dockerfile.gpu").read_text()


@pytest.fixture
def fake(tmp_path):
    """A folder with an `lmtrain` that prints its arguments and exits with the codes in `codes`, in order."""
    program = 'echo "lmtrain $*"\nread -r code rest < codes || exit 0\necho "$rest" > codes\nexit "$code"\n'
    (tmp_path / "lmtrain").write_text(f"#!/usr/bin/env bash\n{program}")
    (tmp_path / "lmtrain").chmod(0o755)
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    (tmp_path / "sleep").chmod(0o755)
    (tmp_path / "codes").write_text("0\n")
    (tmp_path / "deploy").symlink_to(DEPLOY)
    return tmp_path


def run(folder, program, **environment):
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", program], cwd=folder, env=os.environ | path | environment, capture_output=True, text=True
    )


def test_one_machine_is_plain_lmtrain_with_its_exit_code(fake):
    (fake / "codes").write_text("75\n")
    done = run(fake, "deploy/gpu/train my.yaml --a.b 'c d'")
    assert (done.returncode, done.stdout) == (75, "lmtrain train my.yaml --a.b c d\n")


def test_several_machines_need_all_three_and_number_the_processes_as_on_the_page(fake):
    given = {"COORDINATOR": "10.0.0.1:5789", "NODES": "2", "NODE": "0"}
    for missing in given:
        done = run(fake, "deploy/gpu/train my.yaml", **{name: given[name] for name in given if name != missing})
        assert (done.returncode, done.stdout) == (2, "")
    lines = next(block for _, block in blocks(GPU / "README.md") if block.startswith("COORDINATOR")).splitlines()
    for number, line in enumerate(lines):
        place = {"coordinator_address": "10.0.0.1:5789", "num_processes": len(lines), "process_id": number}
        flags = " ".join(f"--trainer.distributed.{name} {value}" for name, value in place.items())
        assert run(fake, line).stdout == f"lmtrain train my.yaml {flags}\n"


def test_the_loop_of_the_page_restarts_until_done_or_a_mistake_and_signals_reach_lmtrain(fake):
    loop = next(block for _, block in blocks(GPU / "README.md") if block.startswith("until"))
    for codes, starts, code in (("1 75 134 0", 4, 0), ("1 2 0", 2, 0)):
        (fake / "codes").write_text(f"{codes}\n")
        done = run(fake, loop)
        assert (done.stdout.count("lmtrain train my.yaml"), done.returncode) == (starts, code)
    # `train` execs lmtrain, which has its process id
    (fake / "lmtrain").write_text("#!/bin/sh\necho $$\n")
    first, second = run(fake, "deploy/gpu/train my.yaml & echo $!; wait").stdout.split()
    assert first == second
