"""deploy/tpu with workers behind a real SSH server: commands, restarts, broken connections, secrets."""

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.desk import MADE_OF, PLACE, SCRIPTS, Desk, finish
from deploy.workers import running_workers
from faults.runs import wait_for

pytestmark = pytest.mark.long

SECRET = "hf_do-not-tell-$me'\""
NETWORK = "UNAVAILABLE: Connection reset by peer"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    folder = tmp_path / "desk"
    folder.mkdir()
    with running_workers(folder) as workers:
        made = Desk(folder, workers)
        yield made
        made.end()


def output(done: subprocess.CompletedProcess) -> list[str]:
    """The lines of CMD, without those of gcloud and launch."""
    return [line for line in done.stdout.splitlines() if not line.startswith(("SSH: ", "SCP: ", "launch: ", "#####"))]


def test_the_output_and_every_word_of_the_command_arrive_as_given(desk):
    words = ["a  b", "'", '"', "$HOME `id` $(id)", "line\nline\n", "", "*", "\\", "ä€\t", "--", "A=b"]
    program = (
        "import json, sys, os; print(os.getcwd()); print(json.dumps([sys.argv[1:], os.environ['X'], os.environ['Y']]))"
    )
    done = desk.babysit("--", f"X={words[0]}\n$'", "Y=", "python3", "-c", program, *words)
    place, found = output(done)
    assert place == f"{desk.home(1, 0)}/lmtrain"
    assert json.loads(found) == [words, "a  b\n$'", ""]
    assert desk.verbs() == ["describe", "create", "describe", "scp", "ssh", "delete"]
    assert desk.vm is None


@pytest.mark.parametrize(("codes", "expected"), [("1 2", 2), ("75 6", 6)])
def test_all_workers_run_with_the_same_run_id_and_the_worst_exit_code_counts(desk, codes, expected):
    desk.make_vm(workers=2)
    command = f'codes=({codes}); echo "$RUN_ID ${{HOME##*-}}"; exit ${{codes[${{HOME##*-}}]}}'
    done = desk.babysit("--retries", "1", "--", "bash", "-c", command, code=expected)
    run_id = output(done)[0].split()[0]
    assert sorted(output(done)) == [f"{run_id} {number}" for number in range(2)]
    assert run_id.startswith("my-tpu-")
    assert f"RUN_ID={run_id}" in done.stderr


def test_secrets_reach_the_command_by_a_private_file_and_appear_nowhere_else(desk):
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
    words = ["WANDB_API_KEY=from-CMD", "python3", str(script)]
    done = desk.babysit("--keep", "--", *words, HF_TOKEN=SECRET, WANDB_API_KEY="from here")
    assert output(done) == ["arrived"]
    printed = done.stdout + done.stderr + json.dumps(desk.calls())
    for secret in (SECRET, "from-CMD", "from here"):
        assert secret not in printed
        assert json.dumps(secret)[1:-1] not in printed
    (file,) = [path for path in desk.home(1, 0).rglob("*") if path.is_file() and b"hf_do" in path.read_bytes()]
    assert file.name == ".lmtrain-environment"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def own_repository(folder: Path) -> Path:
    """A checkout with these scripts and an install.sh that records its arguments."""
    (folder / "tools").mkdir(parents=True)
    (folder / "deploy").mkdir()
    subprocess.run(["cp", "-r", SCRIPTS, folder / "deploy"], check=True)
    record = 'echo "installed $* from $(cat which)" >> ~/done; echo "$PYTHON" > ~/python\n'
    (folder / "tools" / "install.sh").write_text(record)
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
    homes = [desk.home(1, number) for number in range(2)]
    for home in homes:
        assert (home / "done").read_text() == "installed tpu from the commit\n"
        assert (home / "python").read_text().startswith("python")
        assert (home / "lmtrain" / "deploy" / "tpu" / "launch").exists()
    assert desk.verbs() == ["describe", "create", "describe", "scp", "ssh"]
    # again: the VM stays, the workers get the new commit, and deleted files are removed
    (checkout / "deploy" / "tpu" / "launch.old").touch()
    git(checkout, "add", ".")
    git(checkout, "commit", "-qam", "2")
    desk.do(str(script), *PLACE, *MADE_OF)
    assert desk.verbs().count("create") == 1
    assert (homes[0] / "done").read_text().endswith("installed tpu from not committed\n")
    (checkout / "deploy" / "tpu" / "launch.old").unlink()
    git(checkout, "commit", "-qam", "3")
    desk.do(str(script), *PLACE, *MADE_OF)
    assert not (homes[0] / "lmtrain" / "deploy" / "tpu" / "launch.old").exists()


def test_launch_leaves_the_command_running_with_a_log_and_refuses_a_second_start(desk):
    desk.make_vm()
    (desk.home(0, 0) / "lmtrain").mkdir()
    command = 'launch "A=x y" bash -c \'echo "$A $RUN_ID"; while [ ! -e ~/go ]; do sleep 0.1; done; echo end\''
    call = [desk.folder / "bin" / "gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-tpu", "--zone=z", "--worker=all"]
    call += ["--quiet", "--ssh-flag=-oBatchMode=yes", f"--command={SCRIPTS}/{command}"]

    def launch() -> subprocess.CompletedProcess:
        return subprocess.run(call, env=desk.environment, capture_output=True, text=True, timeout=100)

    first = launch()
    assert first.returncode == 0, first.stderr
    (log,) = (desk.home(0, 0) / "lmtrain" / "logs").glob("*.out")
    run_id = log.stem
    assert f"started {run_id}" in first.stderr
    wait_for(lambda: log.read_text() == f"x y {run_id}\n")
    second = launch()
    assert second.returncode == 1
    assert "is running already" in second.stderr
    (desk.home(0, 0) / "go").touch()
    wait_for(lambda: log.read_text().endswith("end\n"))
    wait_for(lambda: not desk.processes(desk.vm))
    assert launch().returncode == 0


def test_a_vm_in_another_state_is_recreated(desk):
    desk.make_vm(state="TERMINATED")
    desk.babysit("--", "true")
    assert desk.verbs() == ["describe", "delete", "describe", "create", "describe", "scp", "ssh", "delete"]


def test_network_errors_are_not_failures_and_an_existing_vm_is_kept_with_the_flag(desk):
    desk.make_vm()
    desk.set(faults=[{"verb": verb, "error": NETWORK, "times": 3} for verb in ("describe", "scp", "ssh")])
    done = desk.babysit("--retries", "1", "--keep", "--", "echo", "hello")
    assert output(done)[-1] == "hello"
    assert NETWORK in done.stderr
    assert "my-tpu is not deleted and costs money" in done.stderr
    assert "create" not in desk.verbs()


def counting(then: str) -> list[str]:
    """A command that appends a line each time it runs, and then executes `then`."""
    return ["bash", "-c", f'echo "$RUN_ID" >> ~/../../runs; number=$(wc -l < ~/../../runs); {then}']


def runs(desk: Desk) -> list[str]:
    file = desk.folder / "runs"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("retries", "then", "code", "starts"),
    [
        (3, "exit 6", 6, 3),
        (3, "exit 2", 2, 1),  # a mistake
        (1, "[ $number -ge 4 ] || exit 75", 0, 4),  # clean stops are not failures
        (1, "exit 255", 255, 1),  # gcloud takes it for a broken connection
    ],
)
def test_retries_are_limited_and_the_exit_code_is_that_of_the_command(desk, retries, then, code, starts):
    desk.setup.write_text("echo set up >> ~/../../set-ups")
    desk.babysit("--retries", str(retries), "--", *counting(then), code=code)
    assert len(runs(desk)) == starts
    assert len(set(runs(desk))) == 1
    assert (desk.folder / "set-ups").read_text() == "set up\n"
    assert desk.verbs()[-1] == "delete"


def test_a_preemption_is_not_a_failure_even_if_gcloud_reports_it_late(desk):
    command = counting("[ $number -ge 3 ] || { touch ~/up; sleep 100; }")
    process = desk.start_babysit("--retries", "2", "--", *command)
    for vm in (1, 2):
        wait_for(lambda vm=vm: (desk.home(vm, 0) / "up").exists(), [process])
        with desk.state() as state:
            # gcloud still reports READY after the failure and before the next run
            state["vm"] |= {"gone": True, "states": ["READY", "READY", "PREEMPTED"]}
            (pid,) = (desk.home(vm, 0) / "lmtrain" / "logs").glob("*.pid")
            os.killpg(int(pid.read_text()), signal.SIGKILL)
    finish(process)
    assert len(runs(desk)) == 3


def test_the_other_workers_are_stopped_when_one_has_failed(desk):
    desk.make_vm(workers=2)
    command = (
        "[[ $HOME == *-1 ]] || { until [ -e ~/../worker-1/up ]; do sleep 0.1; done; exit 6; }; "
        "trap 'echo TERM >> ~/terms; exit 75' TERM; touch ~/up; while :; do sleep 0.1; done"
    )
    done = desk.babysit("--retries", "1", "--", *counting(command), code=6, LMTRAIN_TPU_GRACE="1")
    assert "a worker has failed: stopping the others" in done.stderr
    assert (desk.home(0, 1) / "terms").read_text() == "TERM\n"


def processes(marks: list[str]) -> set[int]:
    """Processes whose command line has all these words."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if set(marks) <= set(words):
            found.add(int(path.name))
    return found


def followers(desk: Desk) -> set[int]:
    """What prints the log of the worker, for each connection to it."""
    return processes(["tail", "--follow"]) & set(desk.processes(desk.vm))


def test_a_broken_connection_attaches_to_the_command_again(desk):
    process = desk.start_babysit("--", *counting("echo one; until [ -e ~/go ]; do sleep 0.1; done; echo two"))
    first = wait_for(lambda: runs(desk) and followers(desk), [process])
    (ssh,) = processes(["ssh", str(desk.folder / "key")])
    os.kill(ssh, signal.SIGKILL)
    wait_for(lambda: followers(desk) - first, [process])
    (desk.home(1, 0) / "go").touch()
    done = finish(process)
    assert "attached to" in done.stdout
    assert output(done)[-1] == "two"
    assert len(runs(desk)) == 1


def test_a_script_that_ends_leaves_the_command_running_and_the_next_one_attaches_to_it(desk):
    command = counting("until [ -e ~/go ]; do sleep 0.1; done; echo end")
    process = desk.start_babysit("--", *command)
    wait_for(lambda: runs(desk), [process])
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    printed = finish(process, 130).stderr
    assert "may still run on my-tpu: the same babysit attaches to it" in printed
    assert "my-tpu is not deleted and costs money" in printed
    first = followers(desk)
    again = desk.start_babysit("--", *command)
    wait_for(lambda: followers(desk) - first, [again])
    (desk.home(1, 0) / "go").touch()
    done = finish(again)
    assert output(done)[-1] == "end"
    assert len(runs(desk)) == 1
    assert desk.vm is None


def test_a_command_that_ends_without_a_connection_is_not_started_again_and_its_end_is_printed(desk):
    command = counting("until [ -e ~/go ]; do sleep 0.1; done; echo the reason; exit 2")
    process = desk.start_babysit("--", *command)
    wait_for(lambda: runs(desk) and followers(desk), [process])
    with desk.state() as state:
        state["vm"]["gone"] = True
    (ssh,) = processes(["ssh", str(desk.folder / "key")])
    os.kill(ssh, signal.SIGKILL)
    (desk.home(1, 0) / "go").touch()
    (code,) = wait_for(lambda: list((desk.home(1, 0) / "lmtrain" / "logs").glob("*.code")))
    assert code.read_text().endswith(" 2\n")
    with desk.state() as state:
        del state["vm"]["gone"]
    done = finish(process, 2)
    assert output(done)[-1] == "the reason"
    assert len(runs(desk)) == 1


def test_a_commit_during_a_run_changes_nothing_under_it(desk, tmp_path):
    checkout = own_repository(tmp_path / "checkout")
    babysit = [str(checkout / "deploy" / "tpu" / "babysit"), *PLACE, *MADE_OF, "--"]
    babysit += counting("until [ -e ~/go ]; do sleep 0.1; done; cat which")
    first = desk.start(*babysit)
    wait_for(lambda: runs(desk) and followers(desk), [first])
    os.killpg(first.pid, signal.SIGTERM)
    finish(first, 143)
    (checkout / "which").write_text("another commit")
    git(checkout, "commit", "-qam", "2")
    before = followers(desk)
    second = desk.start(*babysit)
    wait_for(lambda: followers(desk) - before, [second])
    (desk.home(1, 0) / "go").touch()
    assert output(finish(second))[-1] == "the commit"


def test_simultaneous_starts_of_a_run_start_it_once(desk):
    desk.make_vm()
    home = desk.home(0, 0)
    environment = desk.environment | {"HOME": str(home), "USER": "me", "HOSTNAME": "here"}
    for number in range(5):
        command = [SCRIPTS / "launch", "--follow", "1", f"RUN_ID=run-{number}"]
        command += ["bash", "-c", "echo once >> ~/starts; sleep 0.3; exit 7"]
        keywords = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen(command, **keywords) for _ in range(3)]
        for process in started:
            out, err = process.communicate(timeout=100)
            assert out.endswith("lmtrain-tpu: me@here: exit 7\n"), out + err
        assert (home / "starts").read_text() == "once\n" * (number + 1)
