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
        *((f"cuda{n}", "2_28", (f"jax-cuda{n}-plugin", f"nvidia-cudnn-cu{n}")) for n in (12, 13)),
        # libtpu has no wheels for one before 2.31; the images have Debian 12 with 2.36
        ("tpu", "2_36", ("libtpu",)),
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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "0.9  "),
        ({"XLA_FLAGS": "--xla_dump_to=x"}, "0.9  --xla_dump_to=x"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5  "),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, " 0.6 "),  # jax refuses both
    ],
)
def test_variables_set_by_the_user_stay(given, expected):
    assert sourced(SHOW, **given).stdout.rstrip("\n") == expected


def test_sourcing_twice_changes_nothing():
    assert sourced(f". '{GPU}/env.sh'; {SHOW}").stdout == sourced(SHOW).stdout


def test_the_image_has_the_same_settings():
    text = (DEPLOY / "docker" / "Dockerfile.gpu").read_text()
    fraction = sourced(SHOW).stdout.split(" ")[0]
    assert f"XLA_CLIENT_MEM_FRACTION={fraction}\n" in text


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


@pytest.mark.parametrize("missing", ["COORDINATOR", "NODES", "NODE"])
def test_several_machines_need_all_three(fake, missing):
    given = {"COORDINATOR": "10.0.0.1:5789", "NODES": "2", "NODE": "0"}
    del given[missing]
    done = run(fake, "deploy/gpu/train my.yaml", **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert "several machines need all of" in done.stderr


@pytest.mark.parametrize(("codes", "starts", "code"), [("1 75 134 0", 4, 0), ("1 2 0", 2, 0)])
def test_the_loop_of_the_page_restarts_until_done_or_a_mistake(fake, codes, starts, code):
    (fake / "codes").write_text(f"{codes}\n")
    loop = next(block for _, block in blocks(GPU / "README.md") if block.startswith("until"))
    done = run(fake, loop)
    assert (done.stdout.count("lmtrain train my.yaml"), done.returncode) == (starts, code)


def test_the_commands_of_the_page_for_two_machines_number_the_processes(fake):
    lines = next(block for _, block in blocks(GPU / "README.md") if block.startswith("COORDINATOR")).splitlines()
    for number, line in enumerate(lines):
        place = {"coordinator_address": "10.0.0.1:5789", "num_processes": len(lines), "process_id": number}
        flags = " ".join(f"--trainer.distributed.{name} {value}" for name, value in place.items())
        assert run(fake, line).stdout == f"lmtrain train my.yaml {flags}\n"


def test_signals_reach_lmtrain(fake):
    """`train` execs lmtrain, which has its process id."""
    (fake / "lmtrain").write_text("#!/bin/sh\necho $$\n")
    done = run(fake, "deploy/gpu/train my.yaml & echo $!; wait")
    first, second = done.stdout.split()
    assert first == second
