"""Chat in the browser and by OpenAI's API, for the user of this machine: a server at 127.0.0.1.

    GET  /                       a page to talk to the model
    GET  /v1/models              its name
    POST /v1/chat/completions    replies, also as a stream; see `lmtrain/generation/openai.py`
    GET  /settings               what the page starts with
    POST /render                 the text and the tokens that the template makes of {"messages": [...]}

Requests with another host or from a page of another site are refused: a browser would send them to any address.
"""

import itertools
import json
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import unquote

from lmtrain.generation.chat import ChatEncoder, Pieces
from lmtrain.generation.decode import SamplingSettings
from lmtrain.generation.engine import Engine, Request
from lmtrain.generation.openai import Asked, Completion, RequestError, read_request, usage_of
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log

_ADDRESS = "127.0.0.1"
_SECONDS_BETWEEN_CHECKS = 0.5
_MOST_BYTES = 10_000_000
# A page that loads nothing from elsewhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Replies:
    """Replies of a model to several users at once: a thread advances the engine, others wait for tokens."""

    def __init__(self, engine: Engine, encoder: ChatEncoder, default: SamplingSettings, seed: int = 0):
        self.encoder = encoder
        self.default = default
        self.seq_len = engine.seq_len
        self._seeds = itertools.count(seed)
        self._engine = engine
        self._changed = threading.Condition()
        self._error: Exception | None = None
        for size in (1, 2):  # compiles all programs
            self._engine.add(Request(ids=[0] * size, settings=SamplingSettings(2, temperature=0)))
            while self._engine.step():
                pass
        threading.Thread(target=self._run, name="replies", daemon=True).start()

    def start(self, ids: Sequence[int], settings: SamplingSettings, seed: int | None) -> Request:
        """A new reply to a prompt; None: with the next seed. Raises `RequestError` for one that fills the context."""
        if len(ids) >= self.seq_len:
            raise RequestError(
                f"messages: the conversation has {len(ids)} tokens, which fill the model's context of {self.seq_len}",
                "messages",
                "context_length_exceeded",
            )
        seed = next(self._seeds) if seed is None else seed
        request = Request(ids=ids, settings=settings, seed=seed, ends=self.encoder.ends)
        with self._changed:
            self._engine.add(request)
            self._changed.notify_all()
        return request

    def cancel(self, requests: Sequence[Request]) -> None:
        """End replies that nobody reads."""
        for request in requests:
            self._engine.cancel(request)

    def pieces(
        self, requests: Sequence[Request], stops: Sequence[str], check: Callable[[], None]
    ) -> Iterator[tuple[int, str, str | None]]:
        """The pieces of all replies as they come: number of the reply, text, and with the last one why it ends.
        `check` is called for each, and twice a second while none comes."""
        texts = [Pieces(self.encoder.backend, stops) for _ in requests]
        seen, open_replies = [0] * len(requests), set(range(len(requests)))
        while open_replies:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._error or any(self._is_new(requests[number], seen[number]) for number in open_replies),
                    _SECONDS_BETWEEN_CHECKS,
                )
                if self._error is not None:
                    raise self._error
            check()
            for number in sorted(open_replies):
                request = requests[number]
                reason, new = request.reason, list(request.new)
                if len(new) == seen[number] and reason is None:
                    continue
                seen[number] = len(new)
                piece = texts[number].add(new, is_last=reason is not None)
                if texts[number].is_stopped:
                    self._engine.cancel(request)
                    reason = "stop"
                if reason is not None:
                    open_replies.remove(number)
                yield number, piece, reason

    @staticmethod
    def _is_new(request: Request, seen: int) -> bool:
        return request.reason is not None or len(request.new) > seen

    def _run(self) -> None:
        try:
            is_busy = False
            while True:
                if not is_busy:
                    with self._changed:
                        self._changed.wait_for(lambda: self._engine.is_busy)
                is_busy = self._engine.step()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:  # such as out of memory: every request gets it
            with self._changed:
                self._error = error
                self._changed.notify_all()


class ChatServer(ThreadingHTTPServer):
    """The server; `url` is its address. Set `replies` before it serves. Raises `UserError` for a port that is taken."""

    daemon_threads = True
    request_queue_size = 128
    replies: Replies

    def __init__(self, model: str, port: int, system: str | None = None):
        self.model = model
        self.system = system
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port}: {error}; choose another one") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{_ADDRESS}:{self.server_address[1]}"

    @property
    def hosts(self) -> set[str]:
        """What clients call this server."""
        port = self.server_address[1]
        return {f"{name}{end}" for name in (_ADDRESS, "localhost") for end in (f":{port}", *[""] * (port == 80))}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, format: str, *arguments: Any) -> None:
        return None  # requests are no events of a run

    def do_GET(self) -> None:
        """A page or an object."""
        self._answer(
            {
                "/": self._page,
                "/settings": lambda: self._send(self._settings()),
                "/v1/models": lambda: self._send({"object": "list", "data": [self._model()]}),
                f"/v1/models/{self.server.model}": lambda: self._send(self._model()),
            }
        )

    def do_POST(self) -> None:
        """Replies, or what the template writes."""
        self._answer({"/v1/chat/completions": self._complete, "/render": self._render})

    def _answer(self, routes: Mapping[str, Any]) -> None:
        """Call the function of the path, and send its errors."""
        try:
            self._call(routes)
        except RequestError as error:
            self._send(error.body, HTTPStatus.BAD_REQUEST)
        except UserError as error:
            self._send(RequestError(str(error), "messages").body, HTTPStatus.BAD_REQUEST)
        except ConnectionError:
            self.close_connection = True
        except Exception as error:
            log.error(f"{self.path}: {type(error).__name__}: {error}")
            self._send(RequestError(f"{type(error).__name__}: {error}").body, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _call(self, routes: Mapping[str, Any]) -> None:
        host, origin = self.headers.get("Host", "").lower(), self.headers.get("Origin")
        known = self.server.hosts
        if host not in known or (origin is not None and origin.lower().removeprefix("http://") not in known):
            error = RequestError(f"this server answers at {self.server.url} only, and no pages of other sites")
            self._send(error.body, HTTPStatus.FORBIDDEN)
            return
        route = routes.get(unquote(self.path.partition("?")[0]))
        if route is None:
            self._send(RequestError(f"{self.command} {self.path}: unknown").body, HTTPStatus.NOT_FOUND)
            return
        route()

    def _send(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._write(json.dumps(value, ensure_ascii=False).encode(), "application/json", status)

    def _write(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        if status is not HTTPStatus.OK:  # a body may not have been read
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MOST_BYTES:
            raise RequestError(f"expected a body with a Content-Length of at most {_MOST_BYTES:,} bytes")
        return self.rfile.read(int(length))

    def _page(self) -> None:
        self._write(files("lmtrain.generation").joinpath("page.html").read_bytes(), "text/html")

    def _model(self) -> dict[str, Any]:
        return {"id": self.server.model, "object": "model", "created": 0, "owned_by": "lmtrain"}

    def _settings(self) -> dict[str, Any]:
        replies = self.server.replies
        own = {"model": self.server.model, "context": replies.seq_len, "system": self.server.system}
        return own | asdict(replies.default)

    def _render(self) -> None:
        encoder = self.server.replies.encoder
        asked = read_request(self._body(), self.server.replies.default)
        is_answered = asked.messages[-1]["role"] == "assistant"
        text = encoder.render(asked.messages, asked.tools, add_generation_prompt=not is_answered)
        encoding = encoder.backend.encode(text, add_special_tokens=False)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        self._send({"text": text, "tokens": [{"id": token, "text": text[begin:end]} for token, (begin, end) in spans]})

    def _complete(self) -> None:
        replies = self.server.replies
        asked = read_request(self._body(), replies.default)
        ids = replies.encoder.encode(replies.encoder.render(asked.messages, asked.tools))
        seeds = [None if asked.seed is None else asked.seed + number for number in range(asked.choices)]
        requests = [replies.start(ids, asked.settings, seed) for seed in seeds]
        try:
            if asked.streams:
                self._stream(asked, requests)
                return
            texts, reasons = [""] * len(requests), [""] * len(requests)
            for number, piece, reason in replies.pieces(requests, asked.stops, self._check_client):
                texts[number] += piece
                reasons[number] = reason or ""
            self._send(Completion(self.server.model).complete(texts, reasons, self._usage(requests)))
        finally:
            replies.cancel(requests)

    def _stream(self, asked: Asked, requests: Sequence[Request]) -> None:
        """Server-sent events, to the end of the connection; a client that has gone ends the replies."""
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        completion = Completion(self.server.model)

        def event(value: Any) -> None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()

        for number in range(len(requests)):
            event(completion.part(number, {"role": "assistant", "content": ""}))
        try:
            for number, piece, reason in self.server.replies.pieces(requests, asked.stops, self._check_client):
                if piece:
                    event(completion.part(number, {"content": piece}))
                if reason is not None:
                    event(completion.part(number, {}, reason))
            if asked.with_usage:
                event(completion.usage(self._usage(requests)))
            event("[DONE]")
        except ConnectionError:
            raise
        except Exception as error:  # the status has been sent
            log.error(f"{self.path}: {type(error).__name__}: {error}")
            event(RequestError(f"{type(error).__name__}: {error}").body)

    def _check_client(self) -> None:
        """Raise `ConnectionError` if the client has gone, which writing would find late, or never."""
        is_readable, _, _ = select.select([self.connection], [], [], 0)
        if is_readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError

    @staticmethod
    def _usage(requests: Sequence[Request]) -> dict[str, Any]:
        first = requests[0]
        return usage_of(len(first.ids), first.cached, sum(len(request.new) for request in requests))
