"""Text from a web server."""

import gzip
import urllib.parse
from functools import partial

import pytest
from cache_building import build_cache
from web import QuietFiles, serving

from lmtrain.data.config import DataConfig
from lmtrain.runtime.errors import UserError

SECRET = "planted-0123456789"
SIGNED = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=k%2Fus&X-Amz-Date={}&X-Amz-Expires=60&"
    f"X-Amz-Signature={SECRET}{{}}"
)


class _Signed(QuietFiles):
    """Serves a file to those who sign, with any signature but an expired one; `share.jsonl` by its token."""

    def send_head(self):
        url = urllib.parse.urlsplit(self.path)
        parameters = dict(urllib.parse.parse_qsl(url.query))
        if "token" in parameters:
            self.path = f"/{parameters['token'].removeprefix(SECRET)}.jsonl"
        elif "X-Amz-Signature" not in parameters or parameters["X-Amz-Signature"].endswith("expired"):
            return self.send_error(403)
        return super().send_head()

    def do_HEAD(self):  # noqa: N802  # a name of http.server
        self.send_error(403)  # a URL that is signed for GET


@pytest.fixture
def signed(tmp_path):
    """The URL of a server of the folder `tmp_path/web` that requires signatures."""
    (tmp_path / "web").mkdir()
    for name in ("a", "b"):
        (tmp_path / "web" / f"{name}.jsonl").write_bytes(b'{"text": "%s"}\n' % name.encode() * 40)
    with serving(partial(_Signed, directory=str(tmp_path / "web"))) as address:
        yield f"http://{address}"


@pytest.fixture
def build(tmp_path):
    """`build(url, ...)` builds the cache of these training files."""

    def build_of(*urls, **changes):
        settings = {"tokenizer": "byte", "cache_dir": str(tmp_path / "cache"), "num_preprocess_workers": 1}
        return build_cache(DataConfig(train_urls=list(urls), **settings | changes), "train")

    return build_of


def test_files_of_a_web_server_are_tokenized_and_missing_ones_are_an_error(build, tmp_path):
    content = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    with serving(partial(QuietFiles, directory=str(tmp_path))) as address:
        manifest = build(f"http://{address}/{{a.jsonl,b.jsonl.gz}}")
        assert [shard.documents for shard in manifest.shards] == [2, 2]
        assert manifest.shards[0].sha256 == manifest.shards[1].sha256
        with pytest.raises(UserError, match=f"no such file: http://{address}/c.jsonl"):
            build(f"http://{address}/c.jsonl", cache_dir="other")


def written(folder):
    return {path.name: path.read_bytes() for path in (folder / "cache" / "train").iterdir()}


def test_a_signature_is_in_no_file_and_a_cache_is_used_with_a_renewed_one(signed, build, tmp_path):
    manifest = build(f"{signed}/a.jsonl?version=1&{SIGNED.format(1, 'a')}")
    assert manifest.urls == [manifest.shards[0].source["url"]] == [f"{signed}/a.jsonl?version=1&***"]
    before = written(tmp_path)
    assert all(SECRET.encode() not in content for content in before.values())
    build(f"{signed}/a.jsonl?version=1&X-Amz-Security-Token=new&{SIGNED.format(2, 'b')}")
    assert written(tmp_path) == before
    with pytest.raises(UserError, match="does not match") as error:
        build(f"{signed}/a.jsonl?version=2&{SIGNED.format(1, 'a')}")
    assert SECRET not in str(error.value)
    assert "version=2" in str(error.value)


def test_a_build_resumes_with_a_renewed_signature(signed, build, tmp_path):
    urls = [f"{signed}/{name}.jsonl?{SIGNED}" for name in "ab"]
    build(*(url.format(1, "a") for url in urls))
    before = written(tmp_path)
    for name in ("manifest.json", "shard-00001-of-00002.json", "shard-00001-of-00002.arrayrecord"):
        (tmp_path / "cache" / "train" / name).unlink()
    build(*(url.format(2, "b") for url in urls))
    assert written(tmp_path) == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_cache_of_an_earlier_version_that_holds_a_signature_is_used(signed, build, tmp_path, finished):
    """Earlier versions wrote the URLs as they are."""
    url = f"{signed}/a.jsonl?{SIGNED}"
    build(url.format(1, "a"))
    folder = tmp_path / "cache" / "train"
    for path in folder.glob("*.json"):
        path.write_text(path.read_text().replace("?***", f"?{SIGNED.format(1, 'a')}"))
    assert SECRET in (folder / "manifest.json").read_text()
    if not finished:
        (folder / "manifest.json").unlink()
    shards = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*")}
    manifest = build(url.format(2, "b"))
    assert manifest.urls == [f"{signed}/a.jsonl?***"]
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*")} == shards


def test_sources_that_differ_in_their_credentials_only_are_all_read(signed, build):
    urls = [f"{signed}/share.jsonl?token={SECRET}{name}" for name in "ab"]
    manifest = build(*urls)
    assert [shard.source["url"] for shard in manifest.shards] == [f"{signed}/share.jsonl?***"] * 2
    assert manifest.shards[0].source["fingerprint"] != manifest.shards[1].source["fingerprint"]
    assert build(*urls).shards == manifest.shards
    with pytest.raises(UserError, match="has another order or length"):
        build(*reversed(urls))


def test_a_source_whose_credentials_name_another_file_has_changed(signed, build, tmp_path):
    build(f"{signed}/share.jsonl?token={SECRET}a")
    with pytest.raises(UserError, match=r"share\.jsonl\?\*\*\* has changed since it was cached"):
        build(f"{signed}/share.jsonl?token={SECRET}b")


def test_masked_secrets_are_needed_only_to_build(signed, build, tmp_path):
    build(f"{signed}/a.jsonl?{SIGNED.format(1, 'a')}")
    assert build(f"{signed}/a.jsonl?***").tokens
    with pytest.raises(UserError, match=r"data\.train_urls: the secrets of .*/a\.jsonl\?\*\*\* are masked"):
        build(f"{signed}/a.jsonl?***", cache_dir=str(tmp_path / "other"))


@pytest.mark.parametrize(
    "url",
    [
        "{signed}/a.jsonl?version=1&" + SIGNED.format(1, "expired"),
        "http://me:" + SECRET + "@127.0.0.1:9/a.jsonl",
        "nonsense://me:" + SECRET + "@bucket/a.jsonl",
        "{signed}/a.docx?" + SIGNED.format(1, "a"),
    ],
)
def test_a_message_about_a_source_has_no_secret(signed, build, url):
    with pytest.raises(UserError) as error:
        build(url.format(signed=signed))
    assert "***" in str(error.value)
    assert SECRET not in str(error.value)


def test_bad_records_are_reported_without_the_secret_of_their_url(signed, build, tmp_path):
    (tmp_path / "web" / "a.jsonl").write_bytes(b'{"text": "a"}\nnot JSON\n')
    url = f"{signed}/a.jsonl?{SIGNED.format(1, 'a')}"
    with pytest.raises(UserError) as error:
        build(url)
    assert str(error.value).startswith(f"{signed}/a.jsonl?***:2: not JSON")
    manifest = build(url, on_bad_record="skip", max_bad_fraction=1.0)
    assert manifest.shards[0].bad_records[0].startswith(f"{signed}/a.jsonl?***:2: not JSON")
    assert all(SECRET.encode() not in content for content in written(tmp_path).values())
