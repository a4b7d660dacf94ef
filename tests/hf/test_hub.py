"""The Hub: reachability, complete downloads, uploads in one commit, and errors with the reason and advice."""

import hashlib
import json
import os
import re
import shlex
import socket
import time
from pathlib import Path

import pytest
from hf.fake_hub import Account

from lmtrain.hf.hub import offline_reason, parse_ref, prepare_hub
from lmtrain.runtime.errors import UserError

WEIGHTS = bytes(range(256)) * 300
# Setup code that records waits instead of sleeping.
NO_WAITS = "import time\nwaits = []\ntime.sleep = waits.append"


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
        for name, value in (("NO_PROXY", "hub.invalid"), ("HF_ENDPOINT", "huggingface.co")):  # which is no URL
            offline_reason.cache_clear()
            monkeypatch.setenv(name, value)
            assert not prepare_hub()
            monkeypatch.delenv("HF_HUB_OFFLINE")


def test_a_ref_is_a_repository_with_an_optional_revision():
    for name in ("gpt2", "acme/Tiny-1.5_b"):
        assert parse_ref(name) == (name, None)
    assert parse_ref("acme/tiny@runs/step-10") == ("acme/tiny", "runs/step-10")


INVALID = ["", "a/", "a/b/c", "./a", "~/a", "https://huggingface.co/a/b", "a b", "-a", "a--b", "a..b", "a.git"]
INVALID += ["tést/a", "a" * 97, "a@", "@main", "a/b@c@d", "a/b@c d", "a/b@../c"]


@pytest.mark.parametrize("ref", INVALID)
def test_an_invalid_ref_is_refused(ref):
    with pytest.raises(UserError, match="owner/name@revision"):
        parse_ref(ref)


def check(asked, answers) -> None:
    """Each call is a user error with this part in its text, or returns None."""
    for (call, part), answer in zip(asked.items(), answers, strict=True):
        if part is None:
            assert answer is None, call
        else:
            assert answer.startswith("UserError: "), call
            assert part in answer, call


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
    asked = {
        'fetch_file("a b", "x")': "'a b'",
        'fetch_file("acme/none", "x")': "acme/none: x cannot be read from the hub: repository not found",
        'fetch_file("acme/tiny@nope", "x")': f"{hub.url}/acme/tiny/tree/main",
        'fetch_file("acme/gated", "config.json")': f"request access at {hub.url}/acme/gated",
        'fetch_file("lab/private", "config.json")': "private and requires a token",
        'fetch_file("acme/closed", "x")': "authentication required",
        'fetch_file("acme/hidden", "x")': "authentication required",
        'use_token("hf_ofAStranger")': None,
        'fetch_file("acme/gated@main", "config.json")': f"request access at {hub.url}/acme/gated",
        'fetch_file("lab/private@main", "config.json")': "private and your token has no access",
        'fetch_file("acme/forbidden", "x")': f"{hub.url}/settings/tokens",
        'use_token("hf_ofNobody")': None,
        'fetch_file("acme/tiny", "a")': "invalid token in HF_TOKEN",
        'use_token("hf_ofNobody", "HUGGING_FACE_HUB_TOKEN")': None,
        'fetch_file("acme/tiny", "b")': "invalid token in HUGGING_FACE_HUB_TOKEN",
        'use_token("hf_“curly”")': None,
        'fetch_file("acme/tiny", "c")': "HF_TOKEN has characters",
    }
    answers = hub.ask(*asked)
    check(asked, answers)
    assert not any("cache" in answer for answer in answers if answer)  # which cannot help here

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
    again = 'connect(HF_HUB_OFFLINE="1")'
    both = hub.ask(*calls, again, *calls, HF_ENDPOINT="http://127.0.0.1:9")
    nowhere, off = both[: len(calls)], both[len(calls) + 1 :]
    for found, reason in ((nowhere, "http://127.0.0.1:9 cannot be reached"), (off, "HF_HUB_OFFLINE is set")):
        assert found[:2] == [path, None]
        assert Path(found[2]).read_bytes() == b"whole"
        assert found[3] is None  # since the complete file list was downloaded
        for answer in found[4:]:
            assert reason in answer
            assert f"not in the cache {cached}" in answer
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
    found = hub.ask(*calls, 'fetch_file("acme/tiny", "none")', setup=NO_WAITS)
    assert [Path(path).read_bytes() for path in found[:-1]] == list(contents.values())

    hub.fail(503, 1000, "HEAD /acme/tiny/")
    hub.fail("drop", 1000, "HEAD /acme/gone/")
    hub.fail(429, 1000, "HEAD /acme/busy/")
    others = [f'fetch_file("acme/{name}", "b.json")' for name in ("tiny", "gone", "busy")]
    *cached, broken, gone, busy = hub.ask(*calls, 'fetch_file("acme/tiny", "none")', *others, setup=NO_WAITS)
    assert cached == found
    for answer, reason in ((broken, "HTTP 503"), (gone, "disconnected"), (busy, "HTTP 429")):
        assert ": b.json cannot be read from the hub: " in answer
        assert reason in answer


def test_an_unwritable_cache_is_not_reported_as_an_error_of_the_hub(hub):
    hub.add("acme/tiny", {"config.json": b"{}"})
    (hub.home / "file").write_text("")
    place = str(hub.home / "file" / "cache")
    (answer,) = hub.ask('fetch_file("acme/tiny", "config.json")', HF_HUB_CACHE=place)
    assert answer.startswith("UserError: acme/tiny: config.json cannot be read")
    assert "Not a directory" in answer
    assert place in answer


@pytest.fixture
def export(hub):
    """Files of a folder `my export` by name; the folder also has internal files that must not be uploaded."""
    files = {"config.json": b"{}\n", "model.safetensors": WEIGHTS, "README.md": b"# A card\n", "sub/empty.txt": b""}
    folder = hub.home / "my export"
    for name, content in {**files, ".git/HEAD": b"ref", ".cache/huggingface/x": b"x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


def committed(request) -> dict[str, str]:
    """Names of the files in a commit, and the kind of each."""
    lines = [json.loads(line) for line in request.body.splitlines()]
    return {line["value"]["path"]: line["key"] for line in lines if line["key"] != "header"}


def test_a_folder_is_uploaded_in_one_commit(hub, export):
    upload = 'upload_folder("my export", "lab/new", "step 10")'
    change = """Path("my export/config.json").write_bytes(b"[]\\n"), Path("my export/README.md").unlink()"""
    url, again, _, changed = hub.ask(upload, upload, change, upload.replace("10", "20"), HF_TOKEN=hub.token)
    new = hub.repositories["lab/new"]
    second, first = new.history()[:2]
    assert new.messages() == ["step 20", "step 10", "first"]
    assert url == again == f"{hub.url}/lab/new/commit/{first}"
    assert changed == f"{hub.url}/lab/new/commit/{second}"
    attributes = {".gitattributes": new.files()[".gitattributes"]}
    assert new.commits[first].files == export | attributes
    assert new.files() == {**export, "config.json": b"[]\n"} | attributes  # files that the folder lacks are kept

    wish = json.loads(hub.asked("/repos/create")[0].body)
    assert (wish["organization"], wish["name"]) == ("lab", "new")
    assert not {"private", "visibility"} & wish.keys()  # the default of the owner on the Hub
    kinds = dict.fromkeys(export, "file") | {"model.safetensors": "lfsFile"}
    assert [committed(request) for request in hub.asked("/commit/")] == [kinds, {"config.json": "file"}]
    assert [request.line.split()[0] for request in hub.requests if request.storage] == ["PUT"]
    assert {r.headers.get("authorization") for r in hub.requests if not r.storage} == {f"Bearer {hub.token}"}


def test_a_branch_is_created_once_and_an_existing_repository_keeps_its_settings(hub, export):
    there = hub.add("lab/there", {"old.txt": b"old"}, private=True)
    main = there.branches["main"]
    urls = hub.ask(
        'upload_folder("my export", "lab/there@runs/10", "ten")',
        """Path("my export/config.json").write_bytes(b"[]\\n")""",
        f'use_token("{hub.token}", "HUGGING_FACE_HUB_TOKEN")',
        'upload_folder("my export", "lab/there@runs/10", "again")',
        'upload_folder("my export", "mine@main", "ten")',  # without an owner, the owner of the token is used
        HF_TOKEN=hub.token,
    )
    assert there.private
    assert there.branches["main"] == main
    assert there.messages("runs/10") == ["again", "ten", "first"]
    assert there.files("runs/10") == {"old.txt": b"old", **export, "config.json": b"[]\n"}
    assert [urls[3], urls[0]] == [f"{hub.url}/lab/there/commit/{id}" for id in there.history("runs/10")[:2]]
    mine = hub.repositories["somebody/mine"]
    assert urls[4] == f"{hub.url}/somebody/mine/commit/{mine.branches['main']}"
    assert mine.files()["model.safetensors"] == WEIGHTS
    assert not hub.asked("/branch/main")


def test_failing_uploads_are_detected_early(hub, export):
    hub.accounts["hf_ofAReader"] = Account("somebody", role="read")
    hub.accounts["hf_fineGrained"] = Account("somebody", role="fineGrained")
    asked = {
        'check_upload("lab/new")': "upload requires a token",
        f'use_token("{hub.token}")': None,
        'check_upload("lab/other")': None,
        'check_upload("Somebody/new@step-10")': None,
        'check_upload("new")': None,
        'check_upload("a/b/c")': "'a/b/c'",
        f'check_upload("lab/new@{"0a" * 20}")': "is a commit",
        'check_upload("lap/new")': "can write to somebody, lab",
        'use_token("hf_fineGrained")': None,
        'check_upload("lap/other")': None,  # such tokens do not list all their permissions
        'use_token("hf_ofAReader")': None,
        'check_upload("somebody/new")': "read-only",
        'use_token("hf_ofNobody")': None,
        'check_upload("lab/x")': "invalid token in HF_TOKEN",
        'use_token("hf_two words")': None,
        'check_upload("lab/y")': "HF_TOKEN has characters",
    }
    check(asked, hub.ask(*asked))
    assert {request.line for request in hub.requests} == {"GET /api/whoami-v2 HTTP/1.1"}
    assert hub.repositories == {}

    # A Hub that does not answer, has server errors, or cannot be reached.
    hub.fail("hang")
    hub.fail(502)
    short = "import lmtrain.hf.hub\nlmtrain.hf.hub._CHECK_SECONDS = 1"
    call = 'check_upload("lab/new")'
    upload = 'upload_folder("my export", "lab/new", "x")'
    nowhere, off = 'connect(HF_ENDPOINT="http://127.0.0.1:9")', 'connect(HF_HUB_OFFLINE="1")'
    hub.requests.clear()
    silent, broken, _, gone, _, kept = hub.ask(call, call, nowhere, call, off, upload, setup=short, HF_TOKEN=hub.token)
    assert "timed out" in silent
    assert "HTTP 502" in broken
    assert "http://127.0.0.1:9 cannot be reached" in gone
    assert "HF_HUB_OFFLINE is set" in kept
    assert f"{hub.home}/my export is kept; to upload it by hand: hf upload lab/new " in kept
    assert len(hub.requests) == 2


def test_transient_errors_are_retried_without_a_second_commit(hub, export):
    faults = [
        ("hang", "/repos/create"),
        (500, "/repos/create"),
        ("drop", "/branch/"),
        (503, "PUT "),
        ("drop", "/verify"),
    ]
    for how, where in [*faults, (503, "/commit/"), ("lose", "/commit/")]:
        hub.fail(how, 1, where)
    done = hub.run(
        f"{NO_WAITS}\nfrom lmtrain.hf.hub import upload_folder\n"
        "import lmtrain.hf.hub as module\nmodule._WAITS, module._UPLOAD_SECONDS = (1.5, 2.5, 3.5, 4.5, 5.5), 2\n"
        'print(upload_folder("my export", "lab/new@b", "step 10"), [wait for wait in waits if wait % 1])',
        HF_TOKEN=hub.token,
    )
    new = hub.repositories["lab/new"]
    assert done.stdout.strip() == f"{hub.url}/lab/new/commit/{new.branches['b']} [1.5, 2.5, 3.5, 4.5, 5.5]", done.stderr
    assert "HTTP 503" in done.stderr
    assert new.messages("b") == ["step 10", "first"]
    assert {**new.files("b"), **export} == new.files("b")
    assert len(hub.asked("PUT ")) == 2  # the first was refused; uploaded files are not sent again
    assert len(hub.asked("/commit/")) == 2  # the second succeeded, and was found by the retry
    assert hub.token not in done.stdout + done.stderr
    assert hub.leaks(hub.token) == []


def test_a_failed_upload_keeps_the_folder_and_gives_the_command(hub, export):
    upload = 'upload_folder("my export", "lab/new@b", "step 10")'
    hub.fail(503, 4, "/commit/")
    folder = hub.home / "my export"
    answer, waits = hub.ask(upload, "waits", setup=NO_WAITS, HF_TOKEN=hub.token)
    assert "HTTP 503" in answer
    assert waits == [2, 8, 30]
    assert len(hub.asked("/commit/")) == 4
    assert {name: (folder / name).read_bytes() for name in export} == export

    command = answer.partition("by hand: ")[2]
    assert shlex.split(command) == [
        *("hf", "upload", "lab/new", str(folder), ".", "--revision", "b", "--commit-message", "step 10")
    ]
    assert hub.hf(command, HF_TOKEN=hub.token).returncode == 0
    assert hub.repositories["lab/new"].messages("b") == ["step 10", "first"]
    assert {**hub.repositories["lab/new"].files("b"), **export} == hub.repositories["lab/new"].files("b")


def test_permanent_errors_are_not_retried(hub, export):
    hub.add("lap/there", {})
    hub.fail(400, 1, "/lab/bad/commit/")
    hub.fail(200, 1, "/lab/odd/commit/")
    hub.fail(400, 1, "PUT /" + hashlib.sha256(b"more").hexdigest())
    (hub.home / "more").mkdir()
    (hub.home / "more" / "model.safetensors").write_bytes(b"more")
    (hub.home / "card").mkdir()
    (hub.home / "card" / "README.md").write_text("---\nlicense: [\n---\n")
    (hub.home / "empty").mkdir()
    asked = {
        'upload_folder("my export", "lab/new", "x")': "upload requires a token",
        f'use_token("{hub.token}")': None,
        'upload_folder("my export", "lap/there", "x")': "Bearer ***",
        'upload_folder("my export", "lap/none", "x")': "Bearer ***",
        'upload_folder("my export", "lab/new@refs/pr/9", "x")': "'refs/pr/9'",
        'upload_folder("my export", "lab/bad", "x")': "HTTP 400",
        'upload_folder("my export", "lab/odd", "x")': "not a Hugging Face Hub",
        'upload_folder("more", "lab/new", "x")': "HTTP 400",
        'upload_folder("card", "lab/new", "x")': "README.md",
        'upload_folder("empty", "lab/new", "x")': "has no files",
        'upload_folder("none", "lab/new", "x")': "no such folder",
        f'upload_folder("my export", "lab/new@{"0a" * 20}", "x")': "is a commit",
    }
    *answers, waits = hub.ask(*asked, "waits", setup=NO_WAITS)
    check(asked, answers)
    for call, answer in zip(asked, answers, strict=True):
        if "my export" in call and "@0a" not in call:
            assert re.search(r"/my export is kept; to upload it by hand: hf upload la[bp]/\w+ '", answer), call
    assert waits == []
    assert hub.repositories["lap/there"].files() == {}
    assert not any("x" in repository.messages() for repository in hub.repositories.values())


def test_weights_of_an_earlier_export_are_deleted_in_the_same_commit(hub, export):
    old = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
    old |= {"model.safetensors.index.json": b"{}", "adapter.safetensors": b"other"}
    repository = hub.add("lab/there", {**old, "README.md": b"about"})
    hub.ask('upload_folder("my export", "lab/there", "in one file")', HF_TOKEN=hub.token)
    assert repository.messages() == ["in one file", "first"]
    assert repository.files() == export | {"adapter.safetensors": b"other"}
