"""A Hugging Face Hub on this machine, in memory: the API that models need, accounts with tokens, and injected faults.

Large files are stored on a second server, as in the real Hub, which must never receive a token.
"""

import base64
import hashlib
import http.server
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import traceback
import urllib.parse
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_LARGE = (".safetensors", ".bin")

# Code at the start of every process of `ask`.
_PRELUDE = """
import json, os, sys
from pathlib import Path
from lmtrain.runtime.errors import UserError
from lmtrain.hf.hub import check_upload, fetch_file, offline_reason, upload_folder

def use_token(token, name="HF_TOKEN"):
    for one in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        os.environ.pop(one, None)
    if token:
        os.environ[name] = token

def connect(**environment):
    os.environ.update(environment)
    offline_reason.cache_clear()

def answer(call):
    try:
        return eval(call)
    except UserError as error:
        return f"UserError: {error}"
"""


@dataclass
class Account:
    name: str
    role: str = "write"
    groups: tuple[str, ...] = ()

    def may_write(self, repository: str) -> bool:
        return self.role != "read" and repository.partition("/")[0] in (self.name, *self.groups)


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    parent: str | None

    @property
    def id(self) -> str:
        contents = {name: hashlib.sha1(content).hexdigest() for name, content in self.files.items()}
        return hashlib.sha1(repr((self.message, contents, self.parent)).encode()).hexdigest()


@dataclass
class Repository:
    private: bool = False
    admits: tuple[str, ...] | None = None
    """Accounts that may read its files, if it is gated."""
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> str:
        commit = Commit(message, files, self.branches.get(branch))
        self.commits[commit.id] = commit
        self.branches[branch] = commit.id
        return commit.id

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]].files

    def history(self, branch: str = "main") -> list[str]:
        """Ids of all commits, latest first."""
        ids, id = [], self.branches.get(branch)
        while id is not None:
            ids.append(id)
            id = self.commits[id].parent
        return ids

    def messages(self, branch: str = "main") -> list[str]:
        return [self.commits[id].message for id in self.history(branch)]


class Request(NamedTuple):
    """A received request; `storage` is true on the second server."""

    storage: bool
    line: str
    headers: dict[str, str]
    body: bytes


class FakeHub:
    """The fake Hub, initially with one account and no models, and processes that use it."""

    def __init__(self, home: Path):
        self.home = home
        self.repositories: dict[str, Repository] = {}
        self.token = "hf_aTokenThatWritesForSomebodyAndTheLab"
        self.accounts = {self.token: Account("somebody", groups=("lab",))}
        self.stored: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.surprises: list[str] = []
        """Unknown requests and errors of the fake itself; a test with any of them fails."""
        self.closing = threading.Event()
        self.lock = threading.RLock()
        self._faults: list[list[Any]] = []
        self._servers = [_Server(self, storage=False), _Server(self, storage=True)]
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def close(self) -> None:
        self.closing.set()
        for server in self._servers:
            server.stop()

    def add(self, name: str, files: dict[str, bytes], **keywords: Any) -> Repository:
        """A model repository with one commit on main."""
        repository = self.repositories[name] = Repository(**keywords)
        repository.commit("main", "first", files)
        return repository

    def fail(self, how: int | str, times: int = 1, where: str = "") -> None:
        """A fault of the next requests whose first line contains `where`: a status to answer with, or "drop"
        (disconnect), "lose" (process the request, then disconnect), "cut" (half of the answer), or "hang" (nothing).
        """
        self._faults.append([how, times, where])

    def next_fault(self, line: str) -> int | str | None:
        with self.lock:
            for fault in self._faults:
                if fault[1] > 0 and fault[2] in line:
                    fault[1] -= 1
                    return fault[0]
        return None

    def asked(self, *words: str) -> list[Request]:
        """Requests so far that have all these words in the first line."""
        return [request for request in self.requests if all(word in request.line for word in words)]

    def leaks(self, token: str) -> list[str]:
        """Requests with a token outside the authorization header, or to the storage with that header."""
        found = []
        for request in self.requests:
            headers = {name: value for name, value in request.headers.items() if name.lower() != "authorization"}
            if token in f"{request.line}{headers}" or token.encode() in request.body:
                found.append(request.line)
            if request.storage and len(headers) < len(request.headers):
                found.append(f"storage: {request.line}")
        return found

    def run(self, code: str, **environment: str) -> subprocess.CompletedProcess:
        """Run code in a process with this Hub, an empty home, no token, and none of the user's settings."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and not name.lower().endswith("_proxy")
        }
        own = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",  # the protocol of the newer storage is not implemented here
        }
        # huggingface_hub sends files in a way that httpx has deprecated
        command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code]
        return subprocess.run(
            command, env=kept | own | environment, cwd=self.home, capture_output=True, text=True, timeout=60
        )

    def hf(self, command: str, **environment: str) -> subprocess.CompletedProcess:
        """Run a command of huggingface_hub, such as `hf download acme/tiny`."""
        code = f"import sys\nfrom huggingface_hub.cli.hf import main\nsys.argv = {shlex.split(command)!r}\nmain()"
        return self.run(code, HF_HUB_DISABLE_UPDATE_CHECK="1", **environment)

    def ask(self, *calls: str, setup: str = "", **environment: str) -> list[Any]:
        """Results (or `UserError`s) of calls of lmtrain functions in one process; checks that no token is printed."""
        done = self.run(
            f"{_PRELUDE}\n{setup}\nprint(json.dumps([answer(call) for call in {list(calls)!r}]))", **environment
        )
        assert done.returncode == 0, done.stderr
        assert "%|" not in done.stderr  # no progress bars
        for token in [*self.accounts, *re.findall(r"""hf_\w+""", " ".join([*calls, *environment.values()]))]:
            assert token not in done.stdout
            assert token not in done.stderr
            assert not self.leaks(token)
        return json.loads(done.stdout.splitlines()[-1])


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self, hub: FakeHub, storage: bool):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.storage = hub, storage
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            self.hub.surprises.append(traceback.format_exc())


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str, **headers: str):
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | headers


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        self.hub = self.server.hub
        self.body = self._read_body()
        self.hub.requests.append(Request(self.server.storage, self.requestline, dict(self.headers), self.body))
        fault = self.hub.next_fault(self.requestline)
        if fault in ("drop", "hang"):
            if fault == "hang":
                self.hub.closing.wait()
            self._hang_up()
        elif isinstance(fault, int):
            self._answer(fault, {"error": "injected by a test"})
        else:
            try:
                with self.hub.lock:
                    status, content, headers = self._find_answer()
            except _RefusedError as refused:
                status, content, headers = refused.status, {}, refused.headers
            if fault == "lose":
                self._hang_up()
            else:
                self._answer(status, content, cut=fault == "cut", **headers)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815  # names required by http.server

    def _find_answer(self) -> tuple[int, Any, dict[str, str]]:
        path = self.path.partition("?")[0]
        method = "GET" if self.command == "HEAD" else self.command
        for routed, storage, pattern, answer in _ROUTES:
            match = pattern.fullmatch(path)
            if match and (routed, storage) == (method, self.server.storage):
                found = answer(self, *map(urllib.parse.unquote, match.groups()))
                return found if isinstance(found, tuple) else (200, found, {})
        self.hub.surprises.append(self.requestline)
        raise _RefusedError(404, "", "no such address")

    def _answer(self, status: int, content: Any, cut: bool = False, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    # Authentication and access

    def _account(self) -> Account | None:
        authorization = self.headers.get("Authorization")
        if authorization is None:
            return None
        account = self.hub.accounts.get(authorization.removeprefix("Bearer "))
        if account is None:
            raise _RefusedError(401, "", "Invalid credentials in Authorization header")
        return account

    def _repository(self, name: str, write: bool = False) -> Repository:
        account = self._account()
        repository = self.hub.repositories.get(name)
        if not repository or (repository.private and not (account and account.may_write(name))):
            raise _RefusedError(404 if account else 401, "RepoNotFound", "Repository not found")
        if write:
            self._check_right(name)
        return repository

    def _check_right(self, name: str) -> Account:
        account = self._account()
        if account is None:
            raise _RefusedError(401, "", "log in first")
        if not account.may_write(name):
            # echoes the token, as a faulty proxy might do
            raise _RefusedError(403, "", f"{account.name} may not, with {self.headers['Authorization']}")
        return account

    def _commit(self, repository: Repository, revision: str) -> tuple[str, Commit]:
        id = repository.branches.get(revision, revision)
        if id not in repository.commits:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return id, repository.commits[id]

    # Accounts and repositories

    def whoami(self) -> Any:
        account = self._account()
        if account is None:
            raise _RefusedError(401, "", "log in first")
        groups = [{"name": name} for name in account.groups]
        return {"name": account.name, "orgs": groups, "auth": {"accessToken": {"role": account.role}}}

    def create(self) -> Any:
        wanted = json.loads(self.body)
        account = self._account()
        name = f"{wanted['organization'] or (account.name if account else '')}/{wanted['name']}"
        url = f"{self.hub.url}/{name}"
        self._check_right(name)
        if name in self.hub.repositories:
            return 409, {"error": "You already created this model repo", "url": url}, {}
        repository = self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
        repository.private = wanted.get("visibility") == "private"
        return {"url": url}

    def model_info(self, name: str, revision: str | None = None) -> Any:
        repository = self._repository(name)
        id, commit = self._commit(repository, revision or "main")
        siblings = [{"rfilename": file} for file in commit.files]
        return {"id": name, "sha": id, "private": repository.private, "siblings": siblings}

    def refs(self, name: str) -> Any:
        branches = self._repository(name).branches.items()
        listed = [{"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": id} for branch, id in branches]
        return {"branches": listed, "converts": [], "tags": []}

    def create_branch(self, name: str, branch: str) -> Any:
        repository = self._repository(name, write=True)
        if branch in repository.branches:
            raise _RefusedError(409, "", "Reference already exists")
        repository.branches[branch] = self._commit(repository, json.loads(self.body).get("startingPoint", "main"))[0]
        return {}

    def tree(self, name: str, revision: str) -> Any:
        files = self._commit(self._repository(name), revision)[1].files
        return [{"type": "file", "path": file, "size": len(files[file]), **_tree_ids(file, files)} for file in files]

    # Downloads

    def resolve(self, name: str, revision: str, file: str) -> Any:
        repository = self._repository(name)
        account = self._account()
        if repository.admits is not None and (account is None or account.name not in repository.admits):
            raise _RefusedError(403 if account else 401, "GatedRepo", f"Access to model {name} is restricted")
        id, commit = self._commit(repository, revision)
        about = {"X-Repo-Commit": id}
        if file not in commit.files:
            raise _RefusedError(404, "EntryNotFound", "Entry not found", **about)
        content = commit.files[file]
        if not _is_large(file):
            return 200, content, about | {"ETag": f'"{_git_id(content)}"'}
        oid = hashlib.sha256(content).hexdigest()
        self.hub.stored[oid] = content
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        return 302, b"", about | linked | {"Location": f"{self.hub.storage_url}/{oid}"}

    def read_stored(self, oid: str) -> Any:
        return 200, self.hub.stored[oid], {"ETag": f'"{oid}"'}

    # Uploads

    def preupload(self, name: str, revision: str) -> Any:
        there = self._commit(self._repository(name, write=True), revision)[1].files
        files = []
        for wanted in json.loads(self.body)["files"]:
            path = wanted["path"]
            known = there.get(path)
            oid = None if known is None else hashlib.sha256(known).hexdigest() if _is_large(path) else _git_id(known)
            mode = "lfs" if _is_large(path) else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    def batch(self, name: str) -> Any:
        self._repository(name, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            oid = wanted["oid"]
            upload = {"href": f"{self.hub.storage_url}/{oid}"}
            verify = {"href": f"{self.hub.url}/{name}.git/info/lfs/objects/verify"}
            actions = {} if oid in self.hub.stored else {"actions": {"upload": upload, "verify": verify}}
            objects.append({"oid": oid, "size": wanted["size"], **actions})
        return {"objects": objects, "transfer": "basic"}

    def store(self, oid: str) -> Any:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _RefusedError(400, "", "other bytes than announced")
        self.hub.stored[oid] = self.body
        return {}

    def verify(self, name: str) -> Any:
        self._repository(name, write=True)
        wanted = json.loads(self.body)
        if len(self.hub.stored.get(wanted["oid"], b"")) != wanted["size"]:
            raise _RefusedError(404, "", "no such object")
        return {}

    def commit(self, name: str, branch: str) -> Any:
        repository = self._repository(name, write=True)
        if branch not in repository.branches:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        message = ""
        files = dict(repository.files(branch))
        for line in self.body.splitlines():
            key, value = json.loads(line).values()
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                del files[value["path"]]
            elif key == "lfsFile" and value["oid"] in self.hub.stored:
                files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                raise _RefusedError(400, "", f"{key} cannot be committed: {value}")
        id = repository.commit(branch, message, files)
        return {"commitOid": id, "commitUrl": f"{self.hub.url}/{name}/commit/{id}"}

    def validate_card(self) -> Any:
        bad = "license: [" in json.loads(self.body)["content"]
        return 400 if bad else 200, {"errors": [{"message": "no YAML"}] * bad, "warnings": []}, {}

    def harnesses(self) -> Any:
        return {}


def _is_large(file: str) -> bool:
    return file.endswith(_LARGE)


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


def _tree_ids(file: str, files: dict[str, bytes]) -> dict[str, Any]:
    content = files[file]
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return {"oid": _git_id(content)} | ({"lfs": lfs} if _is_large(file) else {})


def _routes() -> Iterable[tuple[str, bool, re.Pattern, Callable]]:
    name = r"([^/]+(?:/[^/]+)?)"
    for method, path, answer in [
        ("GET", "/api/whoami-v2", _Handler.whoami),
        ("POST", "/api/repos/create", _Handler.create),
        ("POST", "/api/validate-yaml", _Handler.validate_card),
        ("GET", "/api/agent-harnesses", _Handler.harnesses),
        ("GET", f"/api/models/{name}/revision/([^/]+)", _Handler.model_info),
        ("GET", f"/api/models/{name}/refs", _Handler.refs),
        ("GET", f"/api/models/{name}/tree/([^/]+)", _Handler.tree),
        ("POST", f"/api/models/{name}/branch/([^/]+)", _Handler.create_branch),
        ("POST", f"/api/models/{name}/preupload/([^/]+)", _Handler.preupload),
        ("POST", f"/api/models/{name}/commit/([^/]+)", _Handler.commit),
        ("GET", f"/api/models/{name}", _Handler.model_info),
        ("POST", rf"/{name}\.git/info/lfs/objects/batch", _Handler.batch),
        ("POST", rf"/{name}\.git/info/lfs/objects/verify", _Handler.verify),
        ("GET", f"/{name}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ]:
        yield method, False, re.compile(path), answer
    yield "GET", True, re.compile("/([0-9a-f]{64})"), _Handler.read_stored
    yield "PUT", True, re.compile("/([0-9a-f]{64})"), _Handler.store


_ROUTES = list(_routes())
