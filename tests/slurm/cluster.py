"""A real Slurm cluster on this machine: slurmctld, munge, and a slurmd for each of two nodes with two GPUs.

The GPUs are device files that no test opens. Names of nodes are known only to the processes of the cluster.
"""

import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from servers import PLACE, ROOT, daemon, free_ports, programs, until, with_files

NODES = ("node1", "node2")
_DEADLINE_SECONDS = 300

_SETTINGS = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
AuthType=auth/munge
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
FirstJobId={first}
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=4 Gres=gpu:2
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """`submit` runs sbatch with an environment that finds lmtrain; its jobs are Slurm's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = programs()
        self.environment = found | {
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}",
            "REPOSITORY": str(ROOT),
        }

    def call(self, *command: object, cwd: Path | None = None, **environment: str) -> str:
        """Run a program of Slurm. -> its output"""
        words = list(map(str, command))
        keywords = {"capture_output": True, "text": True, "timeout": _DEADLINE_SECONDS}
        done = subprocess.run(words, cwd=cwd, env=os.environ | self.environment | environment, **keywords)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(
        self, cwd: Path, script: str, *arguments: object, options: Sequence[str] = (), **environment: str
    ) -> int:
        """-> the id of the job"""
        path = ROOT / "deploy" / "slurm" / script
        return int(self.call("sbatch", "--parsable", *options, path, *arguments, cwd=cwd, **environment))

    def with_lmtrain(self, folder: Path, source: str) -> dict[str, str]:
        """The environment of jobs that find a Python program with this source as `lmtrain`."""
        (folder / "bin").mkdir()
        file = folder / "bin" / "lmtrain"
        file.write_text(f"#!{sys.executable}\n{source}")
        file.chmod(0o755)
        return {"PATH": f"{file.parent}{os.pathsep}{self.environment['PATH']}"}

    def field(self, job: int, name: str) -> str:
        """A field of `scontrol show job`."""
        return re.search(rf"\b{name}=(\S*)", self.call("scontrol", "show", "job", job))[1]

    def tasks(self, job: int) -> dict[int, int]:
        """The process ids of lmtrain by number of the task, while the job's step runs."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                command = (path / "cmdline").read_bytes().split(b"\0")
                words = dict(
                    word.split(b"=", 1) for word in (path / "environ").read_bytes().split(b"\0") if b"=" in word
                )
            except OSError:
                continue
            if words.get(b"SLURM_JOB_ID") == b"%d" % job and command[1:2] and command[1].endswith(b"/lmtrain"):
                found.setdefault(int(words[b"SLURM_PROCID"]), int(path.name))
        return found

    def until(self, job: int, found: Callable[[], Any]) -> Any:
        """Wait until `found` returns a true value, which is returned.

        A requeued job waits for two minutes, until its credential has expired: here it may start in the next second. In
        the same one, Slurm takes its new credential for the old one, and the job fails.
        """
        deadline = time.monotonic() + _DEADLINE_SECONDS
        looked, requeued = 0.0, 0.0
        while not (result := found()):
            assert time.monotonic() < deadline, self.call("scontrol", "show", "job", job)
            if time.monotonic() > looked + 0.5:
                looked = time.monotonic()
                if self.field(job, "Reason") != "BeginTime":
                    requeued = 0.0
                elif not requeued:
                    requeued = looked
                elif looked > requeued + 1:
                    self.call("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.005)
        return result

    def wait(self, job: int) -> str:
        """Wait until the job has ended and is not requeued. -> its state"""
        self.until(job, lambda: self._has_ended(job))
        return self.field(job, "JobState")

    def _has_ended(self, job: int) -> bool:
        """Whether Slurm lists it no more. Between its end and a requeue there is a moment in which it is not listed."""
        if self.call("squeue", "--noheader", f"--jobs={job}"):
            return False
        output = Path(self.field(job, "StdOut"))
        requested = output.read_text().count(" of at most ") if output.exists() else 0
        return int(self.field(job, "Restarts")) == requested

    def end_jobs(self) -> None:
        """Cancel what a failed test has left."""
        self.call("scancel", "--user=root", "--signal=KILL", "--full")
        self.call("scancel", "--user=root")
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while left := self.call("squeue", "--noheader"):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: paths of sockets have at most 107 characters
    try:
        with ExitStack() as daemons:
            cluster = Cluster(folder)
            _write_settings(folder)
            logs, processes = [], []

            def start(name: str, *command: object) -> None:
                logs.append(folder / f"{name}.log")
                hosts = with_files(command, {"/etc/hosts": folder / "hosts"})
                processes.append(daemons.enter_context(daemon(hosts, logs[-1], **cluster.environment)))

            names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
            start(
                "munged",
                "munged",
                "--foreground",
                "--force",
                *(f"--{n}={folder}/munge.{n.split('-')[0]}" for n in names),
            )
            until((folder / "munge.socket").exists, processes, logs)
            start("slurmctld", "slurmctld", "-D", "-i")
            for node in NODES:
                start(node, "slurmd", "-D", "-N", node, "-d", PLACE / "usr" / "sbin" / "slurmstepd")
            until(lambda: _idle(cluster) == len(NODES), processes, logs)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _idle(cluster: Cluster) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle"]
    done = subprocess.run(command, env=os.environ | cluster.environment, capture_output=True, text=True)
    return len(done.stdout.splitlines())


def _write_settings(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "state").mkdir()
    control, *ports = free_ports(3)
    host = socket.gethostname().partition(".")[0]
    (plugins,) = PLACE.glob("usr/lib/*-linux-gnu/slurm-wlm")
    settings = _SETTINGS.format(
        host=host, control=control, ports=ports, nodes=NODES, folder=folder, plugins=plugins, first=_first_job()
    )
    (folder / "slurm.conf").write_text(settings)
    for gpu in range(2):
        os.mknod(folder / f"gpu{gpu}", stat.S_IFCHR | 0o600, os.makedev(195, gpu))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    names = "".join(f"127.0.0.1 {name}\n" for name in (host, *NODES))
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)


def _first_job() -> int:
    """An id from which on the ports that JAX derives from ids of jobs are free, and not those of another cluster."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in range(61440 + 1000 * (worker % 4) + os.getpid() % 900, 65536):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return 7 * 4096 + port - 61440
    raise AssertionError("no free port")
