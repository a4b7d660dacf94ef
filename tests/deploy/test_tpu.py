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


def test_help_lists_every_accepted_flag(desk):
    for name in ("spin-up", "babysit"):
        done = desk.do(name, "--help")
        assert done.stdout.startswith(f"{name} NAME -z ZONE")
        taken = re.search(r'^parse "(.*)" "\$@"', (SCRIPTS / name).read_text(), re.MULTILINE)
        assert taken
        assert set(re.findall(r"^  .*?(--[a-z-]+) ", done.stdout, re.MULTILINE)) == set(taken[1].split())


# script and flags, and what the message names
SPIN_UP, BABYSIT = ("spin-up", "my-tpu", "-z", "a"), ("babysit", "my-tpu", "-z", "a", "-t", "v3-8")
MISTAKES = [
    ((*SPIN_UP, "--zoned", "b"), "--zoned"),
    (("spin-up", "my-tpu", "-t", "v3-8"), "-z ZONE"),
    (("spin-up", "My_TPU", "-z", "a", "-t", "v3-8"), "lowercase"),
    (SPIN_UP, "-t TYPE"),
    ((*SPIN_UP, "-t", "v3-8", "-s", "nowhere"), "nowhere"),
    ((*SPIN_UP, "-t", "v3-8", "-r", "https://word@host/x"), "password or token"),
    (BABYSIT, "CMD is missing"),
    ((*BABYSIT, "--retries", "0", "--", "true"), "--retries"),
    ((*BABYSIT, "--", "RUN_ID=../x", "true"), "RUN_ID"),
    ((*BABYSIT, "--", "lmtrain", "--a.api_key=b"), "--a.api_key"),
    ((*BABYSIT, "--", "lmtrain", "--a", "s3://b:c@d/e"), "secret in s3"),
]


def test_a_mistake_in_the_flags_is_one_line_without_a_call_to_gcloud(desk):
    for words, named in MISTAKES:
        done = desk.do(*words, code=2)
        lines = [line for line in done.stderr.splitlines() if "uncommitted changes" not in line]
        assert len(lines) == 1, words
        assert named in lines[0]
        assert desk.calls() == []


def test_babysit_requires_an_ssh_agent(desk):
    desk.agent(1)
    done = desk.babysit("--", "true", code=2)
    assert "ssh-add " in done.stderr
    assert desk.calls() == []


def test_flags_become_requests_to_gcloud(tmp_path):
    for number, (words, expected) in enumerate(
        [
            (["-t", "v5litepod-16", "-p"], {"--version=v2-alpha-tpuv5-lite", "--accelerator-type=v5litepod-16"}),
            (["-t", "v6e-8", "-n", "sub"], {"--version=v2-alpha-tpuv6e", "--subnetwork=sub"}),
            (["--type=v4-8", "--use-alpha"], {"alpha", "--version=tpu-ubuntu2204-base"}),
        ]
    ):
        desk = Desk(tmp_path / str(number), {})
        desk.set(states=["PREEMPTED"])
        done = desk.do("spin-up", *PLACE, *desk.own_setup, *words, code=1)
        assert expected <= set(desk.call("create"))
        assert ("--spot" in desk.call("create")) == ("-p" in words)
        assert "my-tpu is PREEMPTED" in done.stderr


def test_a_request_that_gcloud_refuses_ends_the_script(tmp_path):
    for number, (start, words, error, code) in enumerate(
        [
            (Desk.spin_up, (), "PERMISSION_DENIED: no TPUs for you", 2),
            (Desk.spin_up, (), "RESOURCE_EXHAUSTED: no more capacity", 1),
            (Desk.babysit, ("--", "true"), "INVALID_ARGUMENT: no such type", 2),
        ]
    ):
        desk = Desk(tmp_path / str(number), {})
        desk.set(faults=[{"verb": "create", "error": error, "times": 9}])
        assert error in start(desk, *words, code=code).stderr
        assert desk.verbs().count("create") == 1


def test_workers_that_are_not_reached_end_the_script_after_ten_attempts(desk):
    desk.make_vm()
    desk.set(faults=[{"verb": "scp", "error": "Could not connect", "times": 99}])
    done = desk.do("babysit", *PLACE, *MADE_OF, *desk.own_setup, "--", "true", code=69)
    assert "10 of 10" in done.stderr
    assert "my-tpu is not deleted" in done.stderr
    assert desk.vm is not None
