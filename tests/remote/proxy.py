"""An HTTP proxy in front of a store's server, which refuses, changes or ends what a test chooses."""

import http.client
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import NamedTuple, NoReturn

from web import QuietFiles, serving


class Request(NamedTuple):
    """A request before it is forwarded. `number` counts all requests from 1."""

    number: int
    method: str
    path: str


class Reply(NamedTuple):
    """An answer without the server."""

    status: int
    body: bytes = b""


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes


_BUSY_BODY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
# of a store that is accessed too fast
BUSY = (Reply(429, _BUSY_BODY), Reply(503, _BUSY_BODY))


class Cut(Enum):
    """A connection that is reset."""

    BEFORE = "before the server has the request"
    INSTEAD = "in place of the server's answer"
    WITHIN = "in the middle of the answer's body"


class Proxy:
    """Forwards to the port `target`, and counts.

    `refuse` returns the reply to a request that is not forwarded, or where its connection is cut, else None. `garble`
    changes the body of an answer.
    """

    def __init__(self, target: int):
        self.target = target
        self.requests: list[Request] = []
        self.refused: list[Request] = []
        self.refuse: Callable[[Request], Reply | Cut | None] = lambda request: None
        self.garble: Callable[[Request, bytes], bytes] = lambda request, body: body
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._uploaded: dict[str, Answer] = {}
        self.address = ""

    def received(self, method: str, path: str) -> tuple[Request, Reply | Cut | None]:
        """Count a request, and decide about it: one at a time, so that shares of the requests are exact."""
        with self._lock:
            request = Request(next(self._numbers), method, path)
            self.requests.append(request)
            reply = self.refuse(request)
            if reply is not None:
                self.refused.append(request)
        return request, reply

    def repeated(self, path: str, answer: "Answer") -> "Answer":
        """The first answer to an upload with an id, if its client sends it again.

        Cloud Storage answers with the object again, fake-gcs-server with 404.
        """
        if "upload_id=" not in path:
            return answer
        if answer.status < 300:
            self._uploaded[path] = answer
        return self._uploaded.get(path, answer) if answer.status == 404 else answer


def every(number: int, *faults: Reply | Cut) -> Callable[[Request], Reply | Cut | None]:
    """Of each `number` requests one has a fault, of these in turns."""
    turns = itertools.cycle(faults)
    return lambda request: next(turns) if request.number % number == 0 else None


@contextmanager
def proxied(target: int) -> Iterator[Proxy]:
    """A running proxy to the local port `target`."""
    proxy = Proxy(target)

    class Handler(QuietFiles):
        protocol_version = "HTTP/1.1"  # s3fs sends `Expect: 100-continue` before it writes
        disable_nagle_algorithm = True

        def _forward(self) -> None:
            body = self._body()
            request, reply = proxy.received(self.command, self.path)
            headers = {}
            cut = reply if isinstance(reply, Cut) else None
            if cut is Cut.BEFORE:
                self._reset()
            if reply is None or cut:
                connection = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=60)
                sent = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "transfer-encoding")}
                connection.request(self.command, self.path, body, sent | {"Content-Length": str(len(body))})
                got = connection.getresponse()
                skipped = ("transfer-encoding", "connection", "date", "server")
                kept = {k: v for k, v in got.getheaders() if k.lower() not in skipped}
                status, headers, content = proxy.repeated(self.path, Answer(got.status, kept, got.read()))
                reply = Reply(status, proxy.garble(request, content))
                connection.close()
            if cut is Cut.INSTEAD or (cut and (self.command == "HEAD" or not reply.body)):
                self._reset()
            if self.command != "HEAD":
                headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
                headers["Content-Length"] = str(len(reply.body))
            self.send_response(reply.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body[: len(reply.body) // 2] if cut else reply.body)
            if cut:
                self._reset()

        def _reset(self) -> NoReturn:
            """Close the connection with a reset, not with an end."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            raise ConnectionResetError  # ends the handler, which holds the last references to the socket

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") == "chunked":
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _forward  # noqa: N815  # names of http.server

        def handle_one_request(self) -> None:
            with suppress(ConnectionError):  # a client that was killed, or that drops its connections
                super().handle_one_request()

    with serving(Handler) as proxy.address:
        yield proxy
