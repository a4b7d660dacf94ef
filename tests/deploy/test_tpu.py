"""deploy/tpu against a fake gcloud, as far as no worker is reached: flags, requests, refusals."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.desk import MADE_OF, PLACE, SCRIPTS, Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "desk", {})
    yield made
    made.end()


@pytest.mark.parametrize("name", ["spin-up", "babysit"])
def test_help_lists_every_accepted_flag(desk, name):
    done = desk.do(name, "--help")
    assert done.stdout.startswith(f"{name} NAME -z ZONE")
    taken = re.search(r'^parse "(.*)" "\$@"', (SCRIPTS / name).read_text(), re.MULTILINE)
    assert taken
    assert set(re.findall(r"^  .*?(--[a-z-]+) ", done.stdout, re.MULTILINE)) == set(taken[1].split())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("spin-up", ["my-tpu", "-z", "a", "--zoned", "b"], "unknown flag --zoned"),
        ("spin-up", ["my-tpu", "-z", "a", "--keep"], "unknown flag --keep"),
        ("spin-up", ["my-tpu", "-t", "v3-8"], "-z ZONE is missing"),
        ("spin-up", ["-z", "a", "-t", "v3-8"], "NAME of the VM"),
        ("spin-up", ["my-tpu", "-t", "v3-8", "-z"], "-z needs a value"),
        ("spin-up", ["My_TPU", "-z", "a", "-t", "v3-8"], "lowercase letters"),
        ("spin-up", ["my-tpu", "-z", "a"], "-t TYPE is missing"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "true"], "runs no CMD"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v3-8", "-s", "nowhere"], "set-up script not found: nowhere"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v3-8", "-b", "nowhere"], "branch nowhere not found"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v9-8"], "v9-8; set it with -i"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v3-8", "-r", "https://word@host/x"], "has a password or token"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8"], "CMD is missing"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "A=1"], "CMD is missing"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "true"], "CMD comes after --"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "--retries", "0", "--", "true"], "--retries"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "RUN_ID=../x", "true"], "RUN_ID"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "lmtrain", "--a.api_key=b"], "a secret in --a.api_key,"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "lmtrain", "--a", "s3://b:c@d/e"], "a secret in s3,"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_without_a_call_to_gcloud(desk, name, words, message):
    done = desk.do(name, *words, code=2)
    lines = [line for line in done.stderr.splitlines() if "uncommitted changes" not in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert desk.calls() == []


def test_babysit_requires_an_ssh_agent(desk):
    desk.agent(1)
    done = desk.babysit("--", "true", code=2)
    assert "no ssh-agent with a key" in done.stderr
    assert "ssh-add ~/.ssh/google_compute_engine" in done.stderr
    assert desk.calls() == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-t", "v5litepod-16", "-p"], ["--version=v2-alpha-tpuv5-lite", "--accelerator-type=v5litepod-16", "--spot"]),
        (["-t", "v6e-8", "-n", "sub"], ["--version=v2-alpha-tpuv6e", "--subnetwork=sub"]),
        (["-t", "v4-8", "-i", "own"], ["--version=own"]),
        (["--type=v4-8", "--use-alpha"], ["alpha", "--version=tpu-ubuntu2204-base"]),
    ],
)
def test_flags_become_requests_to_gcloud(desk, words, expected):
    desk.set(states=["CREATING", "PREEMPTED"])
    done = desk.do("spin-up", *PLACE, *desk.own_setup, *words, code=1)
    assert set(expected) <= set(desk.call("create"))
    assert ("--spot" in desk.call("create")) == ("-p" in words)
    assert "my-tpu is PREEMPTED; delete it, or run babysit" in done.stderr


@pytest.mark.parametrize(
    ("start", "error", "code", "message"),
    [
        (Desk.spin_up, "PERMISSION_DENIED: no TPUs for you", 2, "no TPUs for you"),
        (Desk.spin_up, "RESOURCE_EXHAUSTED: no more capacity", 1, "no more capacity"),
        (Desk.babysit, "INVALID_ARGUMENT: no such type", 2, "no such type"),
    ],
)
def test_a_request_that_gcloud_refuses_ends_the_script(desk, start, error, code, message):
    desk.set(faults=[{"verb": "create", "error": error, "times": 9}])
    assert message in start(desk, *(["--", "true"] if start is Desk.babysit else []), code=code).stderr
    assert desk.verbs().count("create") == 1


def test_workers_that_are_not_reached_end_the_script_after_ten_attempts(desk):
    desk.make_vm()
    desk.set(faults=[{"verb": "scp", "error": "Could not connect", "times": 99}])
    done = desk.do("babysit", *PLACE, *MADE_OF, *desk.own_setup, "--", "true", code=69)
    assert "not every worker was reached (10 of 10 times in a row)" in done.stderr
    assert "Could not connect" in done.stderr
    assert "my-tpu is not deleted and costs money" in done.stderr
    assert desk.vm is not None
