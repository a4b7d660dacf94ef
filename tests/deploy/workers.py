"""A real SSH server on this machine, with an account and a home for each worker of each VM of the fake gcloud."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.fake_gcloud import Cloud
from servers import PLACE, daemon, free_ports, programs, until, with_files

_VMS, _WORKERS = 5, 2

_SETTINGS = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
Subsystem sftp internal-sftp
MaxStartups 100
SetEnv PATH={path}
"""


@contextmanager
def running_workers(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which the fake gcloud reaches the workers."""
    (port,) = free_ports(1)
    found = programs()
    for name in ("host_key", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(list(map(str, command)), check=True, env=os.environ | found)
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if ".venv" not in part)
    (folder / "sshd_config").write_text(_SETTINGS.format(port=port, folder=folder, path=path))
    accounts = "sshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n"
    for vm in range(_VMS):
        for worker in range(_WORKERS):  # all are this user, with other names and homes
            accounts += f"vm{vm}-{worker}:x:{os.getuid()}:{os.getgid()}::{Cloud(folder).home(vm, worker)}:/bin/bash\n"
    (folder / "passwd").write_text(Path("/etc/passwd").read_text() + accounts)
    server = [PLACE / "usr" / "sbin" / "sshd", "-D", "-e", "-f", folder / "sshd_config"]
    prepared = with_files(server, {"/etc/passwd": folder / "passwd"}, "mount -t tmpfs none /run && mkdir /run/sshd")
    log = folder / "sshd.log"
    with daemon(prepared, log, **found) as process:
        until(lambda: _answers(port), [process], [log])
        yield {"FAKE_WORKERS_PORT": str(port)}


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
