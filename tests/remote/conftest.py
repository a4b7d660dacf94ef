"""Local servers of Google Cloud Storage and Amazon S3, with a folder in each for every test."""

import itertools
import os

# Before any import of gcsfs, which reads it once. It disables a request to Google for the type of the bucket.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import HTTPServer
from pathlib import Path

import fsspec
import pytest
from etils.epath import backend
from remote.google_storage import running_server
from remote.proxy import Proxy, proxied
from web import QuietFiles, serving

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig

BUCKET = "bucket-of-tests"

_numbers = itertools.count()


class Store:
    """A folder of a bucket, accessed without lmtrain and without the listings cache of its file system."""

    def __init__(self, scheme: str, folder: str):
        self.scheme = scheme
        self.url = f"{scheme}://{folder}"
        self._folder = folder
        self._fs = fsspec.filesystem(scheme, use_listings_cache=False)

    def put(self, name: str, content: bytes) -> str:
        self._fs.pipe_file(f"{self._folder}/{name}", content)
        return f"{self.url}/{name}"

    def get(self, name: str) -> bytes:
        return self._fs.cat_file(f"{self._folder}/{name}")

    def delete(self, *names: str) -> None:
        for name in names:
            self._fs.rm_file(f"{self._folder}/{name}")

    def contents(self, folder: str = "") -> dict[str, bytes]:
        """All objects, by their names below `folder`."""
        root = f"{self._folder}/{folder}".rstrip("/")
        return {path.removeprefix(f"{root}/"): self._fs.cat_file(path) for path in self._fs.find(root)}


def forget_file_systems() -> None:
    """Clear fsspec's instances: the next one is created with the environment of that time."""
    for scheme in ("gs", "s3"):
        fsspec.get_filesystem_class(scheme).clear_instance_cache()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Without the user's cloud credentials and without requests to metadata servers."""
    nowhere = str(tmp_path_factory.mktemp("nowhere"))
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("AWS_", "GOOGLE_", "GCE_")) or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("CLOUDSDK_CONFIG", nowhere)
        patch.setenv("NO_GCE_CHECK", "true")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{nowhere}/credentials")
        patch.setenv("AWS_CONFIG_FILE", f"{nowhere}/config")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield patch
        forget_file_systems()


@pytest.fixture(scope="module")
def emulators(environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both servers, each with an empty bucket; environment variables direct gcsfs and s3fs to them."""
    from moto.server import ThreadedMotoServer

    # with the default of 5, some simultaneous connections wait for a second
    environment.setattr(HTTPServer, "request_queue_size", 128)
    amazon = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    amazon.start()
    host, port = amazon.get_host_and_port()
    environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    environment.setenv("AWS_ACCESS_KEY_ID", "somebody")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with running_server(tmp_path_factory.mktemp("google")) as google:
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):  # of gcsfs; of Orbax's arrays
            environment.setenv(name, google)
        forget_file_systems()
        fsspec.filesystem("gs").mkdir(BUCKET)
        fsspec.filesystem("s3").makedirs(BUCKET, exist_ok=True)  # all moto servers in a process share their contents
        yield
        forget_file_systems()
    amazon.stop()


@pytest.fixture(params=[pytest.param("gs", marks=pytest.mark.long), "s3"])
def scheme(request: pytest.FixtureRequest) -> str:
    """The long tests use both stores. Those of the suite that name one use that."""
    return request.param


@pytest.fixture(scope="module")
def new_store(emulators: None) -> Callable[[str], Store]:
    """`new_store("gs")` returns an empty folder that no other test uses."""
    return lambda scheme: Store(scheme, f"{BUCKET}/test-{next(_numbers)}")


@pytest.fixture
def proxy(emulators: None, scheme: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the emulator of `scheme`, for processes and file systems that are started from now on."""
    variables = {"gs": ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), "s3": ("AWS_ENDPOINT_URL",)}[scheme]
    with proxied(int(os.environ[variables[0]].rpartition(":")[2])) as running:
        for name in variables:
            monkeypatch.setenv(name, f"http://{running.address}")
        forget_file_systems()
        yield running
        forget_file_systems()


@pytest.fixture
def store(new_store: Callable[[str], Store], scheme: str) -> Store:
    """An empty folder in each of the two stores."""
    return new_store(scheme)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Path]:
    """The local staging folder; empty when no save is in progress."""
    (tmp_path / "staging").mkdir()
    yield tmp_path / "staging"
    assert os.listdir(tmp_path / "staging") == []


@pytest.fixture
def make(store: Store, staging: Path) -> Iterator[Callable[..., Checkpointer]]:
    """`make()` starts the run in the folder `run`, or restarts it."""
    backend.fsspec_backend._get_filesystem.cache_clear()  # Orbax accesses gs:// with gcsfs too
    made: list[Checkpointer] = []

    def start(**settings: object) -> Checkpointer:
        made.append(Checkpointer(f"{store.url}/run", CheckpointerConfig(staging_dir=str(staging), **settings)))
        return made[-1]

    yield start
    for checkpointer in made:
        checkpointer.close()
    backend.fsspec_backend._get_filesystem.cache_clear()


class _Refuse(QuietFiles):
    """Answers as Google without credentials, and as Amazon without permission."""

    protocol_version = "HTTP/1.1"  # s3fs sends `Expect: 100-continue` before it writes

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "AWS4" in self.headers.get("Authorization", ""):
            status = 403
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        else:
            status = 401
            body = b'{"error": {"code": 401, "message": "Anonymous caller does not have storage.objects.get access"}}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError):  # gcsfs sends two requests at once and reads one answer
                self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815  # names that http.server looks for


@pytest.fixture(params=["gs without credentials", "s3 without credentials", "s3 without permission"])
def private(request: pytest.FixtureRequest, environment: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an inaccessible bucket, each for another reason."""
    with serving(_Refuse) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        patch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        patch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
        if "permission" in request.param:
            patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        forget_file_systems()
        yield f"{request.param[:2]}://private-bucket"
        forget_file_systems()
