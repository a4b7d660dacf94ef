"""deploy/tpu against a fake gcloud: requests, commands on the workers, stops, restarts, hidden secrets."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.fake_gcloud import Cloud
from deploy.scripts import DEPLOY, ROOT
from faults.runs import wait_for

SCRIPTS = DEPLOY / "tpu"
NAMES = ("spin-up", "run", "launch", "babysit")
PLACE = ("my-tpu", "-z", "us-east1-d")
MADE_OF = ("-t", "v3-32")
DEADLINE_SECONDS = 300
SECRET = "hf_do-not-tell-$me'\""
NETWORK = "UNAVAILABLE: Connection reset by peer"


class Desk(Cloud):
    """The user's machine: the scripts with the fake gcloud, and an ssh-agent with a key."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.started: list[subprocess.Popen] = []
        tools = folder / "bin"
        tools.mkdir(parents=True)
        self._program(tools / "gcloud", f'exec {shlex.quote(sys.executable)} {ROOT}/tests/deploy/fake_gcloud.py "$@"')
        self.agent(0)
        (folder / "calls.jsonl").touch()
        state = {"vm": None, "made": 0, "workers": 1, "states": ["READY"], "queue_states": [], "faults": []}
        (folder / "cloud.json").write_text(json.dumps(state))
        self.setup = folder / "setup"
        self.setup.write_text("mkdir -p ~/lmtrain/.venv/bin\n")
        self.own_setup = ("-s", str(self.setup), "-r", "not used")  # so that no copy of the checkout is sent
        workers_path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if ".venv" not in p)
        self.environment = {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "FAKE_GCLOUD": str(folder),
            "FAKE_WORKER_PATH": workers_path,
            "LMTRAIN_TPU_POLL": "0.1",
            "LMTRAIN_TPU_GRACE": "1",
            "LMTRAIN_TPU_HELLO": "2",
        }

    @staticmethod
    def _program(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def agent(self, code: int) -> None:
        self._program(self.folder / "bin" / "ssh-add", f"exit {code}")

    def set(self, **changes: object) -> None:
        with self.state() as state:
            state.update(changes)

    def make_vm(self, workers: int = 1) -> None:
        vm = {"name": "my-tpu", "number": 0, "queue": [], "queued": False, "states": ["READY"]}
        self.set(vm=vm, workers=workers)

    def worker(self, number: int = 0, vm: int = 0) -> Path:
        return self.home({"number": vm}, number)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def verbs(self) -> list[str]:
        """The verbs of the calls to gcloud, repeated ones once."""
        found: list[str] = []
        for call in self.calls():
            verb = call[call.index("tpus") + 2]
            if found[-1:] != [verb]:
                found.append(verb)
        return found

    def call(self, verb: str) -> list[str]:
        return next(call for call in self.calls() if verb in call)

    def start(self, script: str, *words: str, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [SCRIPTS / script, *words],
            env=self.environment | environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def do(self, script: str, *words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
        """Run a script to its end, with this exit code."""
        return finish(self.start(script, *words, **environment), code)

    def run(self, *cmd: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
        return self.do("run", *PLACE, "--", *cmd, code=code, **environment)

    def spin_up(self, *words: str, code: int = 0) -> subprocess.CompletedProcess:
        return self.do("spin-up", *PLACE, *MADE_OF, *self.own_setup, *words, code=code)

    def start_babysit(self, *words: str) -> subprocess.Popen:
        return self.start("babysit", *PLACE, *MADE_OF, *self.own_setup, *words)

    def babysit(self, *words: str, code: int = 0) -> subprocess.CompletedProcess:
        return finish(self.start_babysit(*words), code)

    @property
    def vm(self) -> dict | None:
        with self.state() as state:
            return state["vm"]

    def end(self) -> None:
        """Kill the processes that a failed test has left."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for number in range(10):
            self.signal({"number": number}, signal.SIGKILL)


def finish(process: subprocess.Popen, code: int = 0) -> subprocess.CompletedProcess:
    """Wait for a script, which must have this exit code."""
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, err
    return subprocess.CompletedProcess(process.args, code, out, err)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "desk")
    yield made
    made.end()


@pytest.mark.parametrize("name", NAMES)
def test_help_lists_every_accepted_flag(desk, name):
    done = desk.do(name, "--help")
    assert done.stdout.startswith(f"{name} NAME -z ZONE")
    taken = re.search(r'^parse "(.*)" "\$@"', (SCRIPTS / name).read_text(), re.MULTILINE)
    assert taken
    assert set(re.findall(r"^  .*?(--[a-z-]+) ", done.stdout, re.MULTILINE)) == set(taken[1].split())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("run", ["my-tpu", "-z", "a", "--zoned", "b", "--", "true"], "unknown flag --zoned"),
        ("run", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "true"], "unknown flag -t"),
        ("run", ["my-tpu", "--", "true"], "-z ZONE is missing"),
        ("run", ["-z", "a", "--", "true"], "NAME of the VM"),
        ("run", ["my-tpu", "-z", "--", "true"], "-z needs a value"),
        ("run", ["my-tpu", "-z", "a"], "CMD is missing"),
        ("run", ["my-tpu", "-z", "a", "--", "A=1"], "CMD is missing"),
        ("run", ["my-tpu", "-z", "a", "true"], "CMD comes after --"),
        ("launch", ["My_TPU", "-z", "a", "--", "true"], "lowercase letters"),
        ("spin-up", ["my-tpu", "-z", "a"], "-t TYPE is missing"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "true"], "runs no CMD"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v3-8", "-s", "nowhere"], "set-up script not found: nowhere"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v3-8", "-b", "nowhere"], "branch nowhere not found"),
        ("spin-up", ["my-tpu", "-z", "a", "-t", "v9-8"], "v9-8; set it with -i"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "--retries", "0", "--", "true"], "--retries"),
        ("babysit", ["my-tpu", "-z", "a", "-t", "v3-8", "--", "RUN_ID=../x", "true"], "RUN_ID"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_without_a_call_to_gcloud(desk, name, words, message):
    done = desk.do(name, *words, code=2)
    lines = [line for line in done.stderr.splitlines() if "uncommitted changes" not in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert desk.calls() == []


def test_run_returns_the_exit_code_and_the_output_of_the_command(desk):
    desk.make_vm()
    done = desk.run("bash", "-c", "echo out; echo err >&2; pwd; exit 7", code=7)
    assert done.stdout == f"out\n{desk.worker()}/lmtrain\n"
    assert "\nerr\n" in done.stderr
    assert "begun" not in done.stderr


def test_every_word_of_the_command_arrives_as_given(desk):
    desk.make_vm()
    words = ["a  b", "'", '"', "$HOME `id` $(id)", "line\nline\n", "", "*", "\\", "ä€\t", "--", "# the end", "A=b"]
    program = "import json, sys, os; print(json.dumps([sys.argv[1:], os.environ['X'], os.environ['Y']]))"
    done = desk.run(f"X={words[0]}\n$'", "Y=", "python3", "-c", program, *words)
    assert json.loads(done.stdout) == [words, "a  b\n$'", ""]


@pytest.mark.parametrize(("codes", "expected"), [("75 0", 75), ("1 2", 2), ("2 75", 2), ("75 1", 1)])
def test_all_workers_run_with_the_same_run_id_and_the_worst_exit_code_is_returned(desk, codes, expected):
    desk.make_vm(workers=2)
    command = f'codes=({codes}); echo "$RUN_ID $HOSTNAME"; exit ${{codes[${{HOSTNAME#t1v-}}]}}'
    done = desk.run("bash", "-c", command, code=expected)
    run_id = done.stdout.split()[1]
    assert sorted(done.stdout.splitlines()) == [f"[{number}] {run_id} t1v-{number}" for number in range(2)]
    assert run_id.startswith("my-tpu-")
    assert f"RUN_ID={run_id}" in done.stderr


def test_the_run_id_depends_on_name_and_command_not_on_secrets_and_can_be_set(desk):
    desk.make_vm()

    def run_id(*words: str, **environment: str) -> str:
        return desk.run(*words, "bash", "-c", "echo $RUN_ID", **environment).stdout.strip()

    plain = run_id()
    assert run_id("WANDB_API_KEY=a") == run_id("WANDB_API_KEY=b") == run_id(HF_TOKEN="c") == plain
    assert run_id("A=b") != plain
    assert run_id(RUN_ID="mine") == "mine"
    assert run_id("RUN_ID=own", RUN_ID="mine") == "own"


def test_secrets_reach_the_command_and_appear_nowhere_else(desk):
    desk.make_vm(workers=2)
    program = f"""
import os, pathlib
assert os.environ["HF_TOKEN"] == {SECRET!r}
assert os.environ["WANDB_API_KEY"] == "from-CMD"
me = os.environ["HF_TOKEN"].encode()
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        assert me not in path.read_bytes(), path
    except (FileNotFoundError, ProcessLookupError):
        pass
print("arrived")
"""
    script = desk.folder / "look.py"
    script.write_text(program)
    done = desk.run("WANDB_API_KEY=from-CMD", "python3", str(script), HF_TOKEN=SECRET, WANDB_API_KEY="from here")
    assert done.stdout.count("arrived") == 2
    printed = done.stdout + done.stderr + json.dumps(desk.calls())
    for secret in (SECRET, "from-CMD", "from here"):
        assert secret not in printed
        assert json.dumps(secret)[1:-1] not in printed
    left = [path for path in desk.worker().parent.rglob("*") if path.is_file()]
    assert left
    assert not any(b"hf_do" in path.read_bytes() or b"from-CMD" in path.read_bytes() for path in left)


def test_a_missing_vm_or_program_is_one_clear_line_and_an_unreachable_worker_has_its_own_code(desk):
    done = desk.run("true", code=1)
    assert "is MISSING, not READY" in done.stderr
    desk.make_vm()
    done = desk.run("no-such-program", code=127)
    assert "not found on this worker: no-such-program" in done.stderr
    desk.set(faults=[{"verb": "tpu-vm ssh", "error": "Could not SSH", "times": 1, "code": 2}])
    desk.run("true", code=69)


def test_when_a_worker_fails_the_others_are_stopped_after_the_grace_period(desk):
    desk.make_vm(workers=2)
    done = desk.run("bash", "-c", "trap 'exit 75' TERM; [[ $HOSTNAME == *-0 ]] && exit 3; sleep 100 & wait", code=3)
    assert "stopping 1 worker(s)" in done.stderr


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_stopping_the_script_sends_the_command_one_sigterm(desk, number):
    desk.make_vm(workers=2)
    command = (
        "trap 'sleep 0.3; echo stopped; echo once >> ~/term; exit 75' TERM; echo up > ~/up; while :; do sleep 0.1; done"
    )
    process = desk.start("run", *PLACE, "--", "bash", "-c", command)
    wait_for(lambda: all((desk.worker(worker) / "up").exists() for worker in range(2)))
    process.send_signal(number)
    if number == signal.SIGINT:
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 75
        assert sorted(out.splitlines()) == ["[0] stopped", "[1] stopped"]
    wait_for(lambda: not desk.processes(desk.vm))
    assert [(desk.worker(worker) / "term").read_text() for worker in range(2)] == ["once\n", "once\n"]
    process.communicate()


def test_launch_leaves_the_command_running_with_a_log_on_each_worker(desk):
    desk.make_vm(workers=2)
    command = 'echo "$A $HF_TOKEN"; while [ ! -e ~/go ]; do sleep 0.1; done; echo "end of $RUN_ID"'
    done = desk.do("launch", *PLACE, "--", "A=x y", "bash", "-c", command, HF_TOKEN="hf_one")
    run_id = re.search(r"RUN_ID=(\S+):", done.stderr)
    assert run_id
    for number in range(2):
        log = desk.worker(number) / "lmtrain" / "logs" / f"{run_id[1]}.out"
        assert f"{log}" in done.stdout
        wait_for(lambda log=log: log.exists() and log.read_text() == "x y hf_one\n")
        (desk.worker(number) / "go").touch()
        wait_for(lambda log=log: log.read_text().endswith(f"end of {run_id[1]}\n"))
    assert "hf_one" not in done.stdout + done.stderr


@pytest.mark.parametrize("verb", [pytest.param("launch", marks=pytest.mark.long), "run"])
def test_a_run_is_not_started_twice(desk, verb):
    desk.make_vm()
    command = ["bash", "-c", "echo once >> ~/begun; while [ ! -e ~/go ]; do sleep 0.1; done"]
    desk.do("launch", *PLACE, "--", *command)
    begun = desk.worker(0) / "begun"
    wait_for(begun.exists)
    second = desk.do(verb, *PLACE, "--", *command, code=1)
    assert "already running" in second.stderr
    assert "another RUN_ID" in second.stderr
    desk.do(verb, *PLACE, "--", "true")  # another run is not affected
    (desk.worker(0) / "go").touch()
    desk.do(verb, *PLACE, "--", *command)  # it waits for a run that is exiting
    wait_for(lambda: begun.read_text() == "once\nonce\n")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def own_repository(folder: Path) -> Path:
    """A checkout with these scripts and an install.sh that records its arguments."""
    (folder / "tools").mkdir(parents=True)
    (folder / "deploy").mkdir()
    subprocess.run(["cp", "-r", SCRIPTS, folder / "deploy"], check=True)
    (folder / "tools" / "install.sh").write_text(
        'echo "installed $* from $(cat which)" >> ~/done; echo "$PYTHON" > ~/python\n'
    )
    (folder / "which").write_text("the commit")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def test_spin_up_creates_and_sets_up_every_worker_with_the_committed_files(desk, tmp_path):
    checkout = own_repository(tmp_path / "checkout")
    (checkout / "which").write_text("not committed")
    desk.set(workers=2, states=["CREATING", "CREATING", "READY"])
    script = checkout / "deploy" / "tpu" / "spin-up"
    done = desk.do(str(script), *PLACE, *MADE_OF)
    assert "uncommitted changes" in done.stderr
    assert "gcloud compute tpus tpu-vm delete my-tpu --zone us-east1-d" in done.stderr
    assert "--spot" not in desk.call("create")
    for number in range(2):
        assert (desk.worker(number, 1) / "done").read_text() == "installed tpu from the commit\n"
        assert (desk.worker(number, 1) / "python").read_text().startswith("python")
        assert (desk.worker(number, 1) / "lmtrain" / "deploy" / "tpu" / "run").exists()
    assert desk.verbs() == ["describe", "create", "describe", "ssh"]
    # again: the VM stays, the workers get the new commit, and deleted files are removed
    (checkout / "deploy" / "tpu" / "run").unlink()
    git(checkout, "commit", "-qam", "2")
    desk.do(str(script), *PLACE, *MADE_OF)
    assert desk.verbs().count("create") == 1
    assert (desk.worker(0, 1) / "done").read_text().endswith("installed tpu from not committed\n")
    assert not (desk.worker(0, 1) / "lmtrain" / "deploy" / "tpu" / "run").exists()


def test_spin_up_clones_a_repository_at_a_branch(desk, tmp_path):
    checkout = own_repository(tmp_path / "elsewhere")
    git(checkout, "checkout", "-q", "-b", "other")
    (checkout / "which").write_text("the branch")
    git(checkout, "commit", "-qam", "2")
    git(checkout, "checkout", "-q", "main")
    desk.do("spin-up", *PLACE, *MADE_OF, "-r", f"file://{checkout}", "-b", "other")
    assert (desk.worker(0, 1) / "done").read_text() == "installed tpu from the branch\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-t", "v5litepod-16", "-p"], ["--version=v2-alpha-tpuv5-lite", "--accelerator-type=v5litepod-16", "--spot"]),
        (["-t", "v6e-8", "-n", "sub"], ["--version=v2-alpha-tpuv6e", "--subnetwork=sub"]),
        (["-t", "v4-8", "-i", "own"], ["--version=own"]),
        (["--type=v4-8", "--use-alpha"], ["alpha", "--version=tpu-ubuntu2204-base"]),
        (["-t", "v5p-8", "--queued"], ["queued-resources", "--node-id=my-tpu", "--runtime-version=v2-alpha-tpuv5"]),
    ],
)
def test_flags_become_requests_to_gcloud(desk, words, expected):
    desk.set(queue_states=["WAITING_FOR_RESOURCES", "PROVISIONING"])
    done = desk.do("spin-up", *PLACE, *desk.own_setup, *words)
    assert set(expected) <= set(desk.call("create"))
    assert ("QUEUE_PROVISIONING" in done.stderr) == ("--queued" in words)


@pytest.mark.parametrize(
    ("start", "error", "code", "message"),
    [
        (Desk.spin_up, "PERMISSION_DENIED: no TPUs for you", 2, "no TPUs for you"),
        (Desk.spin_up, "RESOURCE_EXHAUSTED: no more capacity", 1, "no capacity"),
        (Desk.babysit, "INVALID_ARGUMENT: no such type", 2, "no such type"),
    ],
)
def test_a_request_that_gcloud_refuses_ends_the_script(desk, start, error, code, message):
    desk.set(faults=[{"verb": "tpu-vm create", "error": error, "times": 9}])
    assert message in start(desk, *(["--", "true"] if start is Desk.babysit else []), code=code).stderr
    assert desk.verbs().count("create") == 1


def test_a_failed_set_up_is_reported_with_its_exit_code(desk):
    desk.setup.write_text("echo broken >&2; exit 9")
    done = desk.spin_up(code=9)
    assert "broken" in done.stderr
    assert "exit code 9; my-tpu is running and costs money" in done.stderr


def test_babysit_creates_runs_and_deletes(desk):
    desk.set(states=["CREATING", "READY"])
    done = desk.babysit("-p", "--", "echo", "hello")
    assert done.stdout == "hello\n"
    assert desk.verbs() == ["describe", "create", "describe", "ssh", "delete"]
    assert "--spot" in desk.call("create")
    assert desk.vm is None


def test_babysit_uses_an_existing_vm_and_keeps_it_with_the_flag(desk):
    desk.make_vm()
    assert "my-tpu is not deleted and costs money" in desk.babysit("--keep", "--", "true").stderr
    assert desk.verbs() == ["describe", "ssh"]


@pytest.mark.parametrize(("code", "message"), [(2, "no ssh-agent"), (1, "ssh-agent has no key")])
def test_babysit_requires_an_ssh_agent(desk, code, message):
    desk.agent(code)
    done = desk.babysit("--", "true", code=2)
    assert message in done.stderr
    assert "ssh-add ~/.ssh/google_compute_engine" in done.stderr
    assert desk.calls() == []


@pytest.mark.parametrize(
    "state",
    [
        "PREEMPTED",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("FAILED", "TERMINATED", "STOPPED", "REPAIRING")),
    ],
)
def test_a_vm_in_another_state_is_recreated(desk, state):
    desk.make_vm()
    with desk.state() as cloud:
        cloud["vm"]["states"] = [state]
    desk.babysit("--", "true")
    assert desk.verbs() == ["describe", "delete", "describe", "create", "describe", "ssh", "delete"]


@pytest.mark.long
def test_a_failed_queued_resource_is_requested_again(desk):
    desk.set(queue_states=["ACCEPTED", "FAILED"])
    process = desk.start_babysit("--queued", "--", "true")
    wait_for(lambda: "delete" in desk.verbs())
    desk.set(queue_states=["WAITING_FOR_RESOURCES"])
    printed = finish(process).stderr
    assert "QUEUE_FAILED" in printed
    assert "--force" in desk.call("delete")
    assert desk.vm is None


def test_network_errors_are_not_failures(desk):
    verbs = ("tpu-vm describe", "tpu-vm create", "tpu-vm ssh", "tpu-vm delete")
    desk.set(faults=[{"verb": verb, "error": NETWORK, "times": 3} for verb in verbs])
    done = desk.babysit("--retries", "1", "--", "echo", "hello")
    assert done.stdout == "hello\n"
    assert NETWORK in done.stderr
    assert desk.vm is None


def counting(then: str) -> list[str]:
    """A command that appends a line each time it runs, and then executes `then`."""
    return ["bash", "-c", f'echo "$RUN_ID" >> ~/../../runs; number=$(wc -l < ~/../../runs); {then}']


def runs(desk: Desk) -> list[str]:
    return (desk.folder / "runs").read_text().splitlines()


@pytest.mark.parametrize(
    ("retries", "then", "code", "starts"),
    [
        (3, "exit 6", 6, 3),
        (3, "exit 2", 2, 1),  # a mistake
        (1, "[ $number -ge 4 ] || exit 75", 0, 4),  # clean stops are not failures
    ],
)
def test_retries_are_limited_and_the_exit_code_is_that_of_the_command(desk, retries, then, code, starts):
    done = desk.babysit("--retries", str(retries), "--", *counting(then), code=code)
    assert len(runs(desk)) == starts
    assert len(set(runs(desk))) == 1
    assert ("failed 3 time(s)" in done.stderr) == (code == 6)
    assert desk.verbs()[-1] == "delete"


@pytest.mark.long
def test_a_preemption_is_not_a_failure_even_if_gcloud_reports_it_late(desk):
    command = counting("[ $number -ge 3 ] || { touch ~/up; sleep 100; }")
    process = desk.start_babysit("--retries", "2", "--", *command)
    for vm in (1, 2):
        wait_for(lambda vm=vm: (desk.worker(0, vm) / "up").exists())
        with desk.state() as state:
            desk.signal(state["vm"], signal.SIGKILL)
            # gcloud still reports READY after the failure and before the next run
            state["vm"]["states"] = ["READY", "READY", "PREEMPTED"]
    finish(process)
    assert len(runs(desk)) == 3


def test_the_set_up_runs_once_on_a_vm_and_again_on_a_new_one(desk):
    desk.setup.write_text("echo set up >> ~/../../set-ups")
    desk.babysit("--keep", "--", *counting("[ $number -ge 3 ] || exit 1"))
    desk.babysit("--", "true")
    assert (desk.folder / "set-ups").read_text() == "set up\n"
    desk.babysit("--", "true")
    assert (desk.folder / "set-ups").read_text() == "set up\n" * 2


@pytest.mark.long
def test_after_a_broken_connection_the_run_resumes_and_runs_once(desk):
    """The processes left by the broken connection receive one SIGTERM before the next start."""
    command = (
        "trap 'echo TERM >> ~/terms; sleep 0.5; rm ~/one; exit 75' TERM; [ ! -e ~/one ] || exit 2; touch ~/one; "
        "[ $number -ge 2 ] || while :; do sleep 0.1; done"
    )
    process = desk.start_babysit("--retries", "2", "--", *counting(command))
    wait_for(lambda: (desk.worker(0, 1) / "one").exists())
    # the real gcloud reconnects with no script left to send: this must not count as a success
    (desk.worker(0, 1) / "break").touch()
    printed = finish(process).stderr
    assert "CMD exited with 69" in printed
    assert len(runs(desk)) == 2
    assert (desk.worker(0, 1) / "terms").read_text() == "TERM\n"


def test_ctrl_c_stops_the_command_and_keeps_the_vm_with_a_warning(desk):
    command = "trap 'exit 75' TERM; touch ~/up; while :; do sleep 0.1; done"
    process = desk.start_babysit("--", "bash", "-c", command)
    wait_for(lambda: (desk.worker(0, 1) / "up").exists())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    printed = finish(process, 75).stderr
    assert "my-tpu is not deleted and costs money" in printed
    assert "gcloud compute tpus tpu-vm delete my-tpu --zone us-east1-d" in printed
    assert "delete" not in desk.verbs()
    wait_for(lambda: not desk.processes(desk.vm))


@pytest.mark.long
def test_a_command_whose_connection_is_cut_receives_one_sigterm_and_can_still_print(desk):
    """gcloud dies: the worker and babysit both notice, and both stop the remaining processes."""
    command = (
        "trap 'echo saving; echo TERM >> ~/terms; asked=1' TERM; touch ~/up; "
        'until [ -n "$asked" ] || [ $number -ge 2 ]; do sleep 0.1; done; '
        "[ $number -ge 2 ] || { sleep 4; echo end >> ~/terms; }"
    )
    process = desk.start_babysit("--", *counting(command))
    wait_for(lambda: (desk.worker(0, 1) / "up").exists())
    mark = f"FAKE_GCLOUD={desk.folder}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes() and b"fake_gcloud.py" in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)
    printed = finish(process).stderr
    assert "stopping the remaining processes" in printed
    assert len(runs(desk)) == 2
    assert (desk.worker(0, 1) / "terms").read_text() == "TERM\nend\n"
