"""Requests to web servers that fail for a moment."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lmtrain.runtime import remote
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import read_bytes


@pytest.mark.parametrize(("failures", "answer"), [(2, b"content"), (1000, None)])
def test_a_busy_server_is_asked_again_a_few_times_and_the_reason_is_logged_once(failures, answer, caplog, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_SECONDS", 0.001)
    monkeypatch.setattr(remote, "_next_message", 0.0)
    requests = []

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(503 if len(requests) <= failures else 200)
            self.send_header("Content-Length", "7")
            self.end_headers()
            self.wfile.write(b"content")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/file"
        if answer is not None:
            assert read_bytes(url) == answer
            assert len(requests) == failures + 1
        else:
            with pytest.raises(UserError) as caught:
                read_bytes(url)
            assert str(caught.value).startswith(f"{url}: cannot be read: HTTP 503")
            assert len(requests) == 5
        server.shutdown()
    assert caplog.text.count("127.0.0.1: HTTP 503") == 1
