"""Requests to web servers that fail for a moment."""

import pytest
from web import QuietFiles, serving

from lmtrain.runtime import remote
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import read_bytes


@pytest.mark.parametrize(("failures", "answer"), [(2, b"content"), (1000, None)])
def test_a_busy_server_is_asked_again_a_few_times_and_the_reason_is_logged_once(failures, answer, caplog, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_SECONDS", 0.001)
    monkeypatch.setattr(remote, "_next_message", 0.0)
    requests = []

    class Busy(QuietFiles):
        def do_GET(self) -> None:  # noqa: N802
            requests.append(self.path)
            self.send_response(503 if len(requests) <= failures else 200)
            self.send_header("Content-Length", "7")
            self.end_headers()
            self.wfile.write(b"content")

    with serving(Busy) as address:
        url = f"http://{address}/file"
        if answer is not None:
            assert read_bytes(url) == answer
        else:
            with pytest.raises(UserError, match=f"^{url}: cannot be read: HTTP 503"):
                read_bytes(url)
        assert len(requests) == min(failures + 1, 5)
    assert caplog.text.count("127.0.0.1: HTTP 503") == 1
