"""Text from a web server."""

import gzip
import http.server
import threading
from functools import partial

import pytest

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.build import build_cache


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """The URL of a server of the folder `tmp_path/web`."""
    (tmp_path / "web").mkdir()
    handler = partial(_Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_files_of_a_web_server_are_tokenized_and_missing_ones_are_an_error(web, tmp_path):
    content = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "web" / "a.jsonl").write_bytes(content)
    (tmp_path / "web" / "b.jsonl.gz").write_bytes(gzip.compress(content))
    config = DataConfig(
        train_urls=[f"{web}/{{a.jsonl,b.jsonl.gz}}"], tokenizer="byte", cache_dir=str(tmp_path / "cache")
    )
    manifest = build_cache(config, "train")
    assert [shard.documents for shard in manifest.shards] == [2, 2]
    assert manifest.shards[0].sha256 == manifest.shards[1].sha256
    with pytest.raises(UserError, match=f"no such file: {web}/c.jsonl"):
        build_cache(config.model_copy(update={"train_urls": [f"{web}/c.jsonl"], "cache_dir": "other"}), "train")
