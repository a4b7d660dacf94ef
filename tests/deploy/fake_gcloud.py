"""A `gcloud` with the TPU commands, for tests: its VMs are folders and processes on this machine.

Its state is `cloud.json` in the folder FAKE_GCLOUD, and every call is a line of `calls.jsonl` there. It accepts the
flags of the real one (528.0.0; read from its parser) and refuses others. `ssh` runs the command, with the worker's
folder as home and without the caller's environment; when the connection breaks, it reconnects with the rest of its
standard input, like the real one.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_CREATE = ["async", "internal-ips", "preemptible", "reserved", "shielded-secure-boot", "spot"]
_CREATE_VALUES = ["zone", "accelerator-type", "data-disk", "description", "labels", "metadata", "network", "subnetwork"]
# verb: (flags without a value, flags with one, required flags)
VERBS = {
    "tpu-vm create": (_CREATE, [*_CREATE_VALUES, "version"], ["version"]),
    "tpu-vm describe": ([], ["zone"], []),
    "tpu-vm delete": (["async"], ["zone"], []),
    "tpu-vm ssh": (["dry-run", "internal-ip", "plain"], ["zone", "worker", "command", "ssh-flag", "ssh-key-file"], []),
    "queued-resources create": (
        [*_CREATE, "guaranteed"],
        [*_CREATE_VALUES, "runtime-version", "node-id", "valid-until-duration"],
        ["runtime-version", "accelerator-type", "node-id"],
    ),
    "queued-resources describe": ([], ["zone"], []),
    "queued-resources delete": (["async", "force"], ["zone"], []),
}
_CONNECTION_BROKE = 255


class Cloud:
    """The state shared by calls and tests: `with cloud.state() as state` reads it, and writes it back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self.folder / "cloud.json"
            state = json.loads(path.read_text())
            yield state
            path.with_suffix(".new").write_text(json.dumps(state))
            path.with_suffix(".new").replace(path)

    def home(self, vm: dict[str, Any], worker: int) -> Path:
        return self.folder / f"{vm['number']}" / f"worker-{worker}"

    def processes(self, vm: dict[str, Any]) -> list[int]:
        """The processes of this VM."""
        mark = f"FAKE_VM={self.folder}/{vm['number']}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def signal(self, vm: dict[str, Any], number: int) -> None:
        for process in self.processes(vm):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def fail(verb: str, message: str, code: int = 1) -> NoReturn:
    track = "alpha." if sys.argv[1] == "alpha" else ""
    print(f"ERROR: (gcloud.{track}compute.tpus.{verb.replace(' ', '.')}) {message}", file=sys.stderr)
    sys.exit(code)


def parse(words: list[str]) -> tuple[str, argparse.Namespace]:
    words = words[1:] if words[:1] == ["alpha"] else words
    verb = " ".join(words[2:4])
    if words[:2] != ["compute", "tpus"] or verb not in VERBS:
        fail(verb, f"Invalid choice: {' '.join(words)}", 2)
    parser = argparse.ArgumentParser(prog=verb, allow_abbrev=False)
    plain, valued, needed = VERBS[verb]
    parser.add_argument("name")
    for flag in [*plain, "quiet"]:
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in [*valued, "format", "project"]:
        parser.add_argument(f"--{flag}", required=flag in needed)
    given = parser.parse_args(words[4:])  # exits with 2
    if not given.quiet:
        fail(verb, "--quiet is missing: a test cannot answer prompts")
    if not given.zone:
        fail(verb, "Error parsing [tpu]. The [tpu] resource is not properly specified. (no zone)")
    return verb, given


def not_found(verb: str, name: str) -> NoReturn:
    fail(verb, f"NOT_FOUND: Resource 'projects/p/locations/z/nodes/{name}' was not found")


def create(state: dict[str, Any], verb: str, given: argparse.Namespace) -> None:
    if state["vm"] and state["vm"]["name"] == given.name:
        fail(verb, f"ALREADY_EXISTS: Resource 'projects/p/locations/z/nodes/{given.name}' already exists")
    queue = list(state["queue_states"]) if verb.startswith("queued") else []
    state["made"] += 1
    state["vm"] = {
        "name": given.name,
        "number": state["made"],
        "queue": queue,
        "queued": verb.startswith("queued"),
        # the answers of describe, in order; the last one is repeated
        "states": [*state["states"]],
    }


def describe(state: dict[str, Any], verb: str, given: argparse.Namespace) -> None:
    vm = state["vm"]
    if not vm or vm["name"] != given.name:
        not_found(verb, given.name)
    if verb.startswith("queued"):
        if not vm["queued"]:
            not_found(verb, given.name)
        assert given.format == "value(state.state)"
        print(vm["queue"].pop(0) if vm["queue"] else "ACTIVE")
        return
    if vm["queue"]:
        not_found(verb, given.name)  # not yet granted
    assert given.format == "value(state,networkEndpoints.len())"
    now = vm["states"].pop(0) if len(vm["states"]) > 1 else vm["states"][0]
    print(now, state["workers"] if now == "READY" else "", sep="\t")


def delete(cloud: Cloud, state: dict[str, Any], verb: str, given: argparse.Namespace) -> None:
    vm = state["vm"]
    if not vm or vm["name"] != given.name or verb.startswith("queued") != vm["queued"]:
        not_found(verb, given.name)
    if verb.startswith("queued") and not given.force:
        fail(verb, "FAILED_PRECONDITION: a queued resource that is ACTIVE is deleted with --force")
    cloud.signal(vm, signal.SIGKILL)
    state["vm"] = None


def ssh(cloud: Cloud, verb: str, given: argparse.Namespace) -> int:
    """The exit code of the command, or 255 if the VM disappeared."""
    with cloud.state() as state:
        vm, workers = state["vm"], state["workers"]
    if not vm or vm["name"] != given.name:
        not_found(verb, given.name)
    if vm["states"][0] != "READY" or not 0 <= int(given.worker or 0) < workers:
        fail(verb, f"worker {given.worker} of a VM that is {vm['states']}")
    assert "-oBatchMode=yes" in given.__dict__["ssh_flag"].split()
    home = cloud.home(vm, int(given.worker))
    home.mkdir(parents=True, exist_ok=True)
    environment = {
        "HOME": str(home),
        "PATH": os.environ["FAKE_WORKER_PATH"],
        "FAKE_VM": f"{cloud.folder}/{vm['number']}",
        "HOSTNAME": f"t1v-{given.worker}",
    }
    for _ in range(10):  # the number of attempts of the real one
        code = connect(cloud, home, given.command, environment)
        if code != _CONNECTION_BROKE:
            break
        with cloud.state() as state:
            if not state["vm"] or state["vm"]["states"][0] != "READY":
                break
        print("Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].", file=sys.stderr)
    return code


def connect(cloud: Cloud, home: Path, command: str, environment: dict[str, str]) -> int:
    breaks = home / "break"  # a test creates this file to break the connection: the command keeps running
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    remote = subprocess.Popen(["bash", "-c", command], cwd=home, env=environment, start_new_session=True, **pipes)
    assert remote.stdin
    assert remote.stdout
    assert remote.stderr
    ends = [remote.stdin.fileno(), remote.stdout.fileno(), remote.stderr.fileno()]
    broken = threading.Event()

    def carry(source: int, target: int) -> None:
        with contextlib.suppress(OSError):
            while not broken.is_set() and (data := os.read(source, 1 << 16)):
                os.write(target, data)
        if target == ends[0] and not broken.is_set():
            remote.stdin.close()

    carriers = [(0, ends[0]), (ends[1], 1), (ends[2], 2)]
    threads = [threading.Thread(target=carry, args=pair, daemon=True) for pair in carriers]
    for thread in threads:
        thread.start()
    while remote.poll() is None:
        if breaks.exists():
            breaks.unlink()
            broken.set()  # a process of the VM holds its pipes open, like a server that has not noticed
            silent = dict.fromkeys(pipes, subprocess.DEVNULL)
            subprocess.Popen(["sleep", "1000"], pass_fds=ends, env=environment, start_new_session=True, **silent)
            return _CONNECTION_BROKE
        time.sleep(0.02)
    for thread in threads[1:]:
        thread.join(timeout=10)
    return remote.returncode if remote.returncode >= 0 else _CONNECTION_BROKE


def main() -> int:
    cloud = Cloud(Path(os.environ["FAKE_GCLOUD"]))
    verb, given = parse(sys.argv[1:])
    with cloud.state() as state:
        with open(cloud.folder / "calls.jsonl", "a") as file:
            file.write(json.dumps(sys.argv[1:]) + "\n")
        for fault in state["faults"]:
            if fault["verb"] == verb and fault["times"] > 0:
                fault["times"] -= 1
                fault = {"code": 1} | fault
                break
        else:
            fault = None
    if fault:
        fail(verb, fault["error"], fault["code"])
    if verb == "tpu-vm ssh":
        return ssh(cloud, verb, given)
    with cloud.state() as state:
        if verb.endswith("create"):
            create(state, verb, given)
        elif verb.endswith("describe"):
            describe(state, verb, given)
        else:
            delete(cloud, state, verb, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
