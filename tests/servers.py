"""Server programs of tools/install_servers.sh, started with files of their own in place of the system's.

A server starts in a mount namespace, where files such as /etc/hosts are covered by others. Nothing outside changes, and
the mounts end with the last process in it.
"""

import contextlib
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".servers"
_DEADLINE_SECONDS = 60


def programs() -> dict[str, str]:
    """The environment in which the programs and their libraries are found."""
    if not (PLACE / ".installed").exists():
        pytest.fail("the servers of this test are missing: bash tools/install_servers.sh", pytrace=False)
    folders = [PLACE / "usr" / "bin", PLACE / "usr" / "sbin"]
    libraries = [*PLACE.glob("usr/lib/*-linux-gnu"), *PLACE.glob("usr/lib/*-linux-gnu/slurm-wlm")]
    libraries += PLACE.glob("lib/*-linux-gnu")
    return {
        "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
    }


def with_files(command: Sequence[object], files: Mapping[str, Path], then: str = "true") -> list[str]:
    """`command` in a mount namespace in which each key of `files` is its value, after the shell command `then`."""
    mounts = [f"mount --bind {shlex.quote(str(new))} {shlex.quote(old)}" for old, new in files.items()]
    script = " && ".join([*mounts, then, 'exec "$@"'])
    return ["unshare", "--mount", "bash", "-c", script, "bash", *map(str, command)]


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, all different."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@contextlib.contextmanager
def daemon(command: Sequence[object], log: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """A running server process in a process group of its own, killed at the end, also if this process is killed."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *map(str, command)],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def until(ready: Callable[[], bool], processes: Sequence[subprocess.Popen], logs: Sequence[Path]) -> None:
    """Wait until servers answer. Fails with their logs."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not ready():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            pytest.fail("\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs), pytrace=False)
        time.sleep(0.05)
