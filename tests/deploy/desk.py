"""The user's machine in the tests of deploy/tpu: the scripts with a fake gcloud, and an ssh-agent with a key."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from deploy.fake_gcloud import Cloud
from deploy.scripts import DEPLOY, ROOT

SCRIPTS = DEPLOY / "tpu"
PLACE = ("my-tpu", "-z", "us-east1-d")
MADE_OF = ("-t", "v3-32")
DEADLINE_SECONDS = 300


class Desk(Cloud):
    """`do("spin-up", ...)` runs a script. `workers` is the environment that reaches an SSH server, if there is one."""

    def __init__(self, folder: Path, workers: dict[str, str]) -> None:
        super().__init__(folder)
        self.started: list[subprocess.Popen] = []
        tools = folder / "bin"
        tools.mkdir(parents=True)
        self._program(tools / "gcloud", f'exec {shlex.quote(sys.executable)} {ROOT}/tests/deploy/fake_gcloud.py "$@"')
        self.agent(0)
        (folder / "calls.jsonl").touch()
        state = {"vm": None, "made": 0, "workers": 1, "states": ["READY"], "faults": []}
        (folder / "cloud.json").write_text(json.dumps(state))
        self.setup = folder / "setup"
        self.setup.write_text("mkdir -p ~/lmtrain/.venv/bin\n")
        self.own_setup = ("-s", str(self.setup), "-r", "not used")  # so that no copy of the checkout is sent
        self.environment = workers | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "FAKE_GCLOUD": str(folder),
            "LMTRAIN_TPU_POLL": "0.1",
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

    def make_vm(self, workers: int = 1, state: str = "READY") -> None:
        self.set(vm={"name": "my-tpu", "number": 0, "states": [state]}, workers=workers)
        for worker in range(workers):
            self.home(0, worker).mkdir(parents=True, exist_ok=True)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def verbs(self) -> list[str]:
        """The verbs of the calls to gcloud, repeated ones once."""
        found: list[str] = []
        for call in self.calls():
            verb = call[call.index("tpu-vm") + 1]
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

    def spin_up(self, *words: str, code: int = 0) -> subprocess.CompletedProcess:
        return self.do("spin-up", *PLACE, *MADE_OF, *self.own_setup, *words, code=code)

    def start_babysit(self, *words: str, **environment: str) -> subprocess.Popen:
        return self.start("babysit", *PLACE, *MADE_OF, *self.own_setup, *words, **environment)

    def babysit(self, *words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
        return finish(self.start_babysit(*words, **environment), code)

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
    assert process.returncode == code, out + err
    return subprocess.CompletedProcess(process.args, code, out, err)
