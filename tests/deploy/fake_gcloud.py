"""A `gcloud` with the TPU commands, for tests: its VMs are folders and accounts of a real SSH server on this machine.

Its state is `cloud.json` in the folder FAKE_GCLOUD, and every call is a line of `calls.jsonl` there. It accepts the
flags of the real one (528.0.0; read from its parser) and refuses others. `ssh` and `scp` run those programs for all
workers at the same time, as the real one does: a connection that fails is repeated, and the exit code is the first one
that is not zero.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

_CREATE = ["async", "internal-ips", "preemptible", "reserved", "shielded-secure-boot", "spot"]
_CREATE_VALUES = ["zone", "accelerator-type", "data-disk", "description", "labels", "metadata", "network", "subnetwork"]
# verb: (flags without a value, flags with one, required flags)
VERBS = {
    "create": (_CREATE, [*_CREATE_VALUES, "version"], ["version"]),
    "describe": ([], ["zone"], []),
    "delete": (["async"], ["zone"], []),
    "ssh": (["dry-run", "internal-ip", "plain"], ["zone", "worker", "command", "ssh-key-file"], []),
    "scp": (["compress", "dry-run", "plain", "recurse"], ["zone", "worker", "scp-flag", "ssh-key-file"], []),
}
_CONNECTION_BROKE = 255
_ATTEMPTS = 10  # of the real one


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

    def home(self, number: int, worker: int) -> Path:
        """The home of the account of a worker of the VM that was created as `number`."""
        return self.folder / f"vm{number}" / f"worker-{worker}"

    def processes(self, vm: dict[str, Any]) -> list[int]:
        """The processes of this VM, which the SSH server has started."""
        mark = f"HOME={self.folder}/vm{vm['number']}/".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if any(word.startswith(mark) for word in path.read_bytes().split(b"\0")):
                    found.append(int(path.parent.name))
        return found

    def signal(self, vm: dict[str, Any], number: int) -> None:
        for process in self.processes(vm):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)


def fail(verb: str, message: str, code: int = 1) -> NoReturn:
    track = "alpha." if sys.argv[1] == "alpha" else ""
    print(f"ERROR: (gcloud.{track}compute.tpus.tpu-vm.{verb}) {message}", file=sys.stderr)
    sys.exit(code)


def parse(words: list[str]) -> tuple[str, argparse.Namespace]:
    words = words[1:] if words[:1] == ["alpha"] else words
    verb = words[3] if words[:3] == ["compute", "tpus", "tpu-vm"] and len(words) > 3 else ""
    if verb not in VERBS:
        fail(verb, f"Invalid choice: {' '.join(words)}", 2)
    parser = argparse.ArgumentParser(prog=verb, allow_abbrev=False)
    plain, valued, needed = VERBS[verb]
    if verb == "scp":
        parser.add_argument("sources", nargs="+")
    parser.add_argument("name")
    for flag in [*plain, "quiet"]:
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in [*valued, "format", "project"]:
        parser.add_argument(f"--{flag}", required=flag in needed)
    parser.add_argument("--ssh-flag", action="append", default=[])
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
    state["made"] += 1
    # `states`: the answers of describe, in order; the last one is repeated
    state["vm"] = {"name": given.name, "number": state["made"], "states": [*state["states"]]}


def describe(state: dict[str, Any], verb: str, given: argparse.Namespace) -> None:
    vm = state["vm"]
    if not vm or vm["name"] != given.name:
        not_found(verb, given.name)
    assert given.format == "value(state,networkEndpoints.len())"
    now = vm["states"].pop(0) if len(vm["states"]) > 1 else vm["states"][0]
    print(now, state["workers"] if now == "READY" else "", sep="\t")


def delete(cloud: Cloud, state: dict[str, Any], verb: str, given: argparse.Namespace) -> None:
    vm = state["vm"]
    if not vm or vm["name"] != given.name:
        not_found(verb, given.name)
    cloud.signal(vm, signal.SIGKILL)
    state["vm"] = None


def connect(cloud: Cloud, verb: str, given: argparse.Namespace) -> int:
    """ssh or scp to the workers. -> the first exit code that is not zero"""
    name, colon, target = given.name.partition(":")
    with cloud.state() as state:
        vm, workers = state["vm"], state["workers"]
    if not vm or vm["name"] != name:
        not_found(verb, name)
    if vm["states"][0] != "READY":
        fail(verb, f"a VM that is {vm['states']}")
    assert given.worker == "all"
    if "gone" in vm:  # preempted, which describe does not report yet
        return _CONNECTION_BROKE
    options = ["-q", "-i", cloud.folder / "key", "-oUserKnownHostsFile=/dev/null", "-oStrictHostKeyChecking=no"]
    port = os.environ["FAKE_WORKERS_PORT"]

    def attempt(worker: int) -> int:
        account = f"vm{vm['number']}-{worker}@127.0.0.1"
        if verb == "scp":
            command = ["scp", "-P", port, *options, *given.sources, f"{account}{colon}{target}"]
        else:
            flags = [word for flag in given.ssh_flag for word in flag.split()]
            assert "-oBatchMode=yes" in flags
            command = ["ssh", "-p", port, *options, *flags, account, given.command]
        for _ in range(_ATTEMPTS):
            print(f"{verb.upper()}: Attempting to connect to worker {worker}...", file=sys.stderr)
            code = subprocess.call(list(map(str, command)), stdin=subprocess.DEVNULL)
            if code >= 0 and code != _CONNECTION_BROKE:
                return code
            with cloud.state() as state:
                if state["vm"] != vm:
                    break
            time.sleep(0.1)
        return _CONNECTION_BROKE

    with ThreadPoolExecutor(workers) as pool:
        codes = list(pool.map(attempt, range(workers)))
    return next(filter(None, codes), 0)


def main() -> int:
    cloud = Cloud(Path(os.environ["FAKE_GCLOUD"]))
    verb, given = parse(sys.argv[1:])
    with cloud.state() as state:
        with open(cloud.folder / "calls.jsonl", "a") as file:
            file.write(json.dumps(sys.argv[1:]) + "\n")
        for fault in state["faults"]:
            if fault["verb"] == verb and fault["times"] > 0:
                fault["times"] -= 1
                break
        else:
            fault = None
    if fault:
        fail(verb, fault["error"])
    if verb in ("ssh", "scp"):
        return connect(cloud, verb, given)
    with cloud.state() as state:
        if verb == "create":
            create(state, verb, given)
            shutil.rmtree(cloud.folder / f"vm{state['made']}", ignore_errors=True)  # a new disk
            for worker in range(state["workers"]):
                cloud.home(state["made"], worker).mkdir(parents=True)
        elif verb == "describe":
            describe(state, verb, given)
        else:
            delete(cloud, state, verb, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
