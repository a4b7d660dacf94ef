"""The Hub: quick check of reachability, complete downloads, and errors with the reason."""

import hashlib
import os
import socket
import time
from pathlib import Path

import pytest
from hf.fake_hub import Account

from lmtrain.hf.hub import offline_reason, parse_ref, prepare_hub
from lmtrain.runtime.errors import UserError

WEIGHTS = bytes(range(256)) * 300


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in os.environ:
        if name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    offline_reason.cache_clear()
    yield
    offline_reason.cache_clear()


def test_an_unreachable_hub_sets_its_libraries_offline_at_once(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    began = time.monotonic()
    assert not prepare_hub()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_settings_skip_the_connection_check(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("must not connect"))
    assert not prepare_hub()


def test_the_hub_or_its_proxy_is_checked_and_nothing_is_set_if_it_can_be_reached(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        assert prepare_hub()
        offline_reason.cache_clear()
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("HTTPS_PROXY", address)
        assert prepare_hub()
        assert "HF_HUB_OFFLINE" not in os.environ
        offline_reason.cache_clear()
        monkeypatch.setenv("NO_PROXY", "hub.invalid")
        assert not prepare_hub()


def test_an_invalid_address_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.co")
    assert not prepare_hub()
    assert offline_reason() == "huggingface.co cannot be reached (HF_ENDPOINT is not a URL)"


@pytest.mark.parametrize(
    ("ref", "parsed"),
    [
        ("gpt2", ("gpt2", None)),
        ("gpt2@main", ("gpt2", "main")),
        ("acme/Tiny-1.5_b", ("acme/Tiny-1.5_b", None)),
        ("acme/tiny@runs/step-10", ("acme/tiny", "runs/step-10")),
        ("a/b@refs/pr/3", ("a/b", "refs/pr/3")),
    ],
)
def test_a_ref_is_a_repository_with_an_optional_revision(ref, parsed):
    assert parse_ref(ref) == parsed


@pytest.mark.parametrize(
    "ref",
    [
        *("", "/a", "a/", "a/b/c", "./a", "~/a", "https://huggingface.co/a/b"),
        *("a b", "-a", "a--b", "a..b", "a.git", "tést/a", "a" * 97),
        *("a@", "@main", "a/b@c@d", "a/b@c d", "a/b@../c"),
    ],
)
def test_an_invalid_ref_is_refused(ref):
    with pytest.raises(UserError, match="expected owner/name or owner/name@revision"):
        parse_ref(ref)


def test_files_are_downloaded_completely_and_only_once(hub):
    repository = hub.add("acme/tiny", {"config.json": b"{}", "model.safetensors": WEIGHTS, "onnx/a.json": b"[]"})
    first = repository.branches["main"]
    repository.commit("runs/b", "second", {"config.json": b'{"second": 2}'})
    hub.add("gpt2", {"config.json": b"gpt2"})
    refs = ["acme/tiny", "acme/tiny@main", f"acme/tiny@{first}", "acme/tiny@runs/b", "gpt2"]
    calls = [f'fetch_file("{ref}", "config.json")' for ref in refs]
    calls += ['fetch_file("acme/tiny", "onnx/a.json")', 'fetch_file("acme/tiny", "model.safetensors")']
    *found, nothing = hub.ask(*calls, *calls, 'fetch_file("acme/tiny", "none.json")', HF_TOKEN=hub.token)
    contents = [b"{}"] * 3 + [b'{"second": 2}', b"gpt2", b"[]", WEIGHTS]
    assert [Path(path).read_bytes() for path in found] == contents * 2
    assert nothing is None
    assert len(hub.asked("GET")) == 5  # the first three are one file, and the second request of each uses the cache
    assert {request.headers.get("authorization") for request in hub.asked("/resolve/")} == {f"Bearer {hub.token}"}


def test_refusals_of_the_hub_give_the_reason_and_advice(hub):
    hub.accounts["hf_ofAStranger"] = Account("stranger")
    hub.add("acme/tiny", {"config.json": b"{}"})
    hub.add("acme/gated", {"config.json": b"gated"}, admits=("somebody",))
    hub.add("lab/private", {"config.json": b"private"}, private=True)
    hub.fail(403, 1, "HEAD /acme/forbidden/")
    hub.fail(401, 1, "HEAD /acme/closed/")
    hub.fail(403, 1, "HEAD /acme/hidden/")
    settings = f"{hub.url}/settings/tokens"
    asked = {
        'fetch_file("a b", "x")': ["'a b'", "expected owner/name"],
        'fetch_file("acme/none", "x")': [
            "acme/none: x cannot be read from the hub",
            "repository not found",
            "spelling",
        ],
        'fetch_file("acme/tiny@nope", "x")': ["unknown revision 'nope'", f"{hub.url}/acme/tiny/tree/main"],
        'fetch_file("acme/gated", "config.json")': [
            "gated repository",
            f"request access at {hub.url}/acme/gated",
            "HF_TOKEN",
        ],
        'fetch_file("lab/private", "config.json")': ["private and requires a token", "set HF_TOKEN"],
        'fetch_file("acme/closed", "x")': ["authentication required", f"set HF_TOKEN to a token from {settings}"],
        'fetch_file("acme/hidden", "x")': ["authentication required", settings],
        'use_token("hf_ofAStranger")': [],
        'fetch_file("acme/gated@main", "config.json")': ["gated repository", f"request access at {hub.url}/acme/gated"],
        'fetch_file("lab/private@main", "config.json")': ["private and your token has no access"],
        'fetch_file("acme/forbidden", "x")': ["the token in HF_TOKEN lacks permission", settings],
        'use_token("hf_ofNobody")': [],
        'fetch_file("acme/tiny", "a")': [
            "invalid token in HF_TOKEN",
            f"create a new one at {settings}",
        ],
        'use_token("hf_ofNobody", "HUGGING_FACE_HUB_TOKEN")': [],
        'fetch_file("acme/tiny", "b")': ["invalid token in HUGGING_FACE_HUB_TOKEN"],
        'use_token("hf_“curly”")': [],
        'fetch_file("acme/tiny", "c")': [
            "HF_TOKEN has characters that are invalid",
            f"copy it again from {settings}",
        ],
    }
    for (call, words), answer in zip(asked.items(), hub.ask(*asked), strict=True):
        if not words:
            assert answer is None, call
        else:
            assert answer.startswith("UserError: "), call
            assert "cache" not in answer, call  # the cache cannot help here
        for word in words:
            assert word in answer, call

    calls = ['fetch_file("acme/gated", "config.json")', 'fetch_file("lab/private", "config.json")']
    found = hub.ask(*calls, HUGGING_FACE_HUB_TOKEN=hub.token)  # the older name also works
    assert [Path(path).read_bytes() for path in found] == [b"gated", b"private"]


def test_the_cache_is_used_when_offline(hub):
    hub.add("acme/tiny", {"config.json": b"{}", "a.json": b"a"})
    hub.add("acme/whole", {"config.json": b"whole", "a.json": b"a"})
    fetch = 'fetch_file("acme/tiny", "config.json")'
    path, nothing = hub.ask(fetch, 'fetch_file("acme/tiny", "none")')
    assert nothing is None
    assert hub.hf("hf download acme/whole --exclude a.json").returncode == 0
    hub.requests.clear()
    calls = [fetch, 'fetch_file("acme/tiny", "none")']
    calls += [f'fetch_file("acme/whole", "{name}")' for name in ("config.json", "none", "a.json")]
    calls += ['fetch_file("acme/tiny", "a.json")', 'fetch_file("acme/tiny@v2", "config.json")']
    began = time.monotonic()
    cached = str(hub.home / "hf" / "hub")
    for environment, reason in [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached (Connection refused)"),
    ]:
        found = hub.ask(*calls, **environment)
        assert found[:2] == [path, None]
        assert Path(found[2]).read_bytes() == b"whole"
        assert found[3] is None  # since the complete file list was downloaded
        for name, answer in zip(["a.json", "a.json", "config.json"], found[4:], strict=True):
            assert f": {name} cannot be read from the hub: {reason}\n" in answer
            assert f"not in the cache {cached} either: use a local folder" in answer
            assert "set HF_HOME" in answer
        assert "`hf download acme/whole`" in found[4]
        assert "`hf download acme/tiny --revision v2`" in found[6]
    assert time.monotonic() - began < 10
    assert hub.requests == []


def test_transient_errors_are_retried_and_others_are_reported(hub):
    contents = {"config.json": b"{}", "a.json": b"a" * 1000, "model.safetensors": WEIGHTS}
    hub.add("acme/tiny", contents)
    hub.fail(503, 1, "HEAD /acme/tiny/resolve/main/config.json")
    hub.fail("cut", 1, "GET /acme/tiny/resolve/main/a.json")
    hub.fail("drop", 1, "GET /" + hashlib.sha256(WEIGHTS).hexdigest())
    calls = [f'fetch_file("acme/tiny", "{name}")' for name in contents]
    setup = "import time\nwaits = []\ntime.sleep = waits.append"
    found = hub.ask(*calls, 'fetch_file("acme/tiny", "none")', setup=setup)
    assert [Path(path).read_bytes() for path in found[:-1]] == list(contents.values())

    hub.fail(503, 1000, "HEAD /acme/tiny/")
    hub.fail("drop", 1000, "HEAD /acme/gone/")
    hub.fail(429, 1000, "HEAD /acme/busy/")
    others = [f'fetch_file("acme/{name}", "b.json")' for name in ("tiny", "gone", "busy")]
    *cached, broken, gone, busy = hub.ask(*calls, 'fetch_file("acme/tiny", "none")', *others, setup=setup)
    assert cached == found
    assert ": b.json cannot be read from the hub: Hub server error (HTTP 503); try again later" in broken
    assert ": b.json cannot be read from the hub: Server disconnected" in gone
    assert ": b.json cannot be read from the hub: rate limit exceeded (HTTP 429)" in busy
    for answer in (broken, gone, busy):
        assert "it is not in the cache " in answer


def test_an_unwritable_cache_is_not_reported_as_an_error_of_the_hub(hub):
    hub.add("acme/tiny", {"config.json": b"{}"})
    (hub.home / "file").write_text("")
    place = str(hub.home / "file" / "cache")
    (answer,) = hub.ask('fetch_file("acme/tiny", "config.json")', HF_HUB_CACHE=place)
    assert answer.startswith(
        "UserError: acme/tiny: config.json cannot be read from the hub: [Errno 20] Not a directory"
    )
    assert place in answer
    assert "\n" not in answer
