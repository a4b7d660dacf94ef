"""deploy/gpu: the install lines resolve, and `train` starts one process, or one of several."""

import json
import os
import re
import signal
import socket
import subprocess

import pytest
from conftest import tiny_settings
from deploy.scripts import BIN, DEPLOY, ROOT, blocks, needs, shellcheck
from faults.runs import end, write_config

GPU = DEPLOY / "gpu"
README = (GPU / "README.md").read_text()


def test_shell_scripts_are_clean():
    shellcheck(GPU / "env.sh", GPU / "train")


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_install_lines_resolve(extra):
    """For Linux on x86_64, with the versions of tools/constraints.txt. Not installed: the wheels are gigabytes."""
    assert f'pip install -c tools/constraints.txt ".[{extra}]"' in README
    command = [BIN / "uv", "pip", "compile", "pyproject.toml", "--extra", extra, "-c", "tools/constraints.txt"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--no-header", "--no-annotate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    versions = dict(re.findall(r"^([\w-]+)==(\S+)", done.stdout, re.MULTILINE))
    constraints = (ROOT / "tools" / "constraints.txt").read_text()
    assert f"jax=={versions['jax']} " in constraints
    assert versions[f"jax-{extra}-plugin"] == versions["jax"]
    assert f"nvidia-cudnn-cu{extra.removeprefix('cuda')}" in versions


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


@pytest.mark.long
@pytest.mark.end_to_end
def test_the_commands_of_the_page_for_two_machines_train_one_run(tmp_path):
    """On loopback and the CPU, with the real command."""
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 4, "id": "pair"}
    write_config(tmp_path, settings)
    (tmp_path / "deploy").symlink_to(DEPLOY)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    lines = next(block for _, block in blocks(GPU / "README.md") if block.startswith("COORDINATOR")).splitlines()
    processes = []
    try:
        for line in lines:
            command = line.replace("10.0.0.1:5789", f"127.0.0.1:{port}").replace("my.yaml", "tiny.json")
            path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
            with open(tmp_path / "output.txt", "a") as output:
                processes.append(
                    subprocess.Popen(
                        ["bash", "-c", command],
                        cwd=tmp_path,
                        env=os.environ | path,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        end(processes)
    assert codes == [0, 0], (tmp_path / "output.txt").read_text()
    logged = [json.loads(line) for line in (tmp_path / "logs" / "pair.metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "train/loss" in line] == [1, 2, 3, 4]


def test_a_signal_reaches_lmtrain(fake):
    """`train` execs lmtrain, so signals reach it directly."""
    (fake / "lmtrain").write_text(
        "#!/usr/bin/env bash\ntrap 'exit 75' TERM\necho ready\nwhile :; do read -r -t 1 || :; done < <(cat)\n"
    )
    command = ["bash", "-c", "exec deploy/gpu/train my.yaml"]
    path = {"PATH": f"{fake}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        command, cwd=fake, env=os.environ | path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 75
    finally:
        end([process])
        process.stdin.close()
        process.stdout.close()


def test_the_page_states_what_its_commands_need_and_that_nothing_was_measured():
    assert all(needs(before) for before, _ in blocks(GPU / "README.md"))
    assert "has not been measured on GPUs" in README
    assert "has not been measured on accelerators" in (DEPLOY / "performance.md").read_text()
