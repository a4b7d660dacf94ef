"""Uploads of exports: complete and in one commit, or an error with advice and the folder kept."""

import hashlib
import json
import re
import shlex

import pytest
from hf.fake_hub import Account

WEIGHTS = bytes(range(256)) * 300

# Setup code that records waits instead of sleeping.
NO_WAITS = "import time\nwaits = []\ntime.sleep = waits.append"


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
    fails = "an upload would fail: "
    settings = f"{hub.url}/settings/tokens"
    asked = {
        'check_upload("lab/new")': [
            "upload requires a token",
            f"set HF_TOKEN to a token with write access from {settings}",
        ],
        f'use_token("{hub.token}")': [],
        'check_upload("lab/other")': [],
        'check_upload("Somebody/new@step-10")': [],
        'check_upload("new")': [],
        'check_upload("a/b/c")': ["'a/b/c'", "expected owner/name"],
        f'check_upload("lab/new@{"0a" * 20}")': ["is a commit", "use lab/new@branch"],
        'check_upload("lap/new")': [f"{fails}the token belongs to somebody, not to lap", "can write to somebody, lab"],
        'use_token("hf_fineGrained")': [],
        'check_upload("lap/other")': [],  # such tokens do not list all their permissions
        'use_token("hf_ofAReader")': [],
        'check_upload("somebody/new")': [f"{fails}the token is read-only; create one with write access at {settings}"],
        'use_token("hf_ofNobody")': [],
        'check_upload("lab/x")': [f"{fails}invalid token in HF_TOKEN", f"a new one at {settings}"],
        'use_token("hf_two words")': [],
        'check_upload("lab/y")': ["HF_TOKEN has characters that are invalid"],
    }
    for (call, words), answer in zip(asked.items(), hub.ask(*asked), strict=True):
        if not words:
            assert answer is None, call
        else:
            assert answer.startswith("UserError: "), call
        for word in words:
            assert word in answer, call
    assert {request.line for request in hub.requests} == {"GET /api/whoami-v2 HTTP/1.1"}
    assert hub.repositories == {}

    # A Hub that does not answer, has server errors, or cannot be reached.
    hub.fail("hang")
    hub.fail(502)
    short = "import lmtrain.hf.hub\nlmtrain.hf.hub._CHECK_SECONDS = 1"
    check = 'check_upload("lab/new")'
    silent, broken = hub.ask(check, check, setup=short, HF_TOKEN=hub.token)
    assert f"lab/new: {fails}timed out" in silent
    assert f"lab/new: {fails}Hub server error (HTTP 502)" in broken
    hub.requests.clear()
    upload = 'upload_folder("my export", "lab/new", "x")'
    reason = "lab/new: upload failed: http://127.0.0.1:9 cannot be reached (Connection refused)"
    gone, kept = hub.ask(check, upload, HF_TOKEN=hub.token, HF_ENDPOINT="http://127.0.0.1:9")
    assert gone == f"UserError: {reason}"
    assert kept.startswith(
        f"UserError: {reason}\n  {hub.home}/my export is kept; to upload it by hand: hf upload lab/new "
    )
    (offline,) = hub.ask(check, HF_TOKEN=hub.token, HF_HUB_OFFLINE="1")
    assert offline == "UserError: lab/new: upload failed: HF_HUB_OFFLINE is set"
    assert hub.requests == []


def test_transient_errors_are_retried_without_a_second_commit(hub, export):
    for how, where in [
        ("hang", "/repos/create"),
        (500, "/repos/create"),
        ("drop", "/branch/"),
        (503, "PUT "),
        ("drop", "/verify"),
        (503, "/commit/"),
        ("lose", "/commit/"),
    ]:
        hub.fail(how, 1, where)
    done = hub.run(
        f"{NO_WAITS}\nfrom lmtrain.hf.hub import upload_folder\n"
        "import lmtrain.hf.hub as module\nmodule._WAITS, module._UPLOAD_SECONDS = (1.5, 2.5, 3.5, 4.5, 5.5), 2\n"
        'print(upload_folder("my export", "lab/new@b", "step 10"), [wait for wait in waits if wait % 1])',
        HF_TOKEN=hub.token,
    )
    new = hub.repositories["lab/new"]
    assert done.stdout.strip() == f"{hub.url}/lab/new/commit/{new.branches['b']} [1.5, 2.5, 3.5, 4.5, 5.5]", done.stderr
    assert "lab/new@b: upload failed: Hub server error (HTTP 503)" in done.stderr
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
    assert answer.startswith(
        "UserError: lab/new@b: upload failed: Hub server error (HTTP 503); try again later\n"
        f"  {folder} is kept; to upload it by hand: "
    )
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
    begin = f'use_token("{hub.token}")'
    asked = {
        'upload_folder("my export", "lab/new", "x")': [
            "lab/new: upload requires a token",
            "set HF_TOKEN",
        ],
        'use_token("hf_ofNobody")': [],
        'upload_folder("my export", "lab/old", "x")': ["invalid token in HF_TOKEN"],
        begin: [],
        'upload_folder("my export", "lap/there", "x")': ["the token in HF_TOKEN lacks permission", "Bearer ***"],
        'upload_folder("my export", "lap/none", "x")': ["the token in HF_TOKEN lacks permission", "Bearer ***"],
        'upload_folder("my export", "lab/new@refs/pr/9", "x")': ["unknown revision 'refs/pr/9'"],
        'upload_folder("my export", "lab/bad", "x")': [
            "lab/bad: upload failed: the Hub refused the request (HTTP 400): injected by a test\n"
        ],
        'upload_folder("my export", "lab/odd", "x")': [
            f"{hub.url} is not a Hugging Face Hub, or an incompatible version"
        ],
        'upload_folder("more", "lab/new", "x")': [
            "lab/new: upload failed: the Hub refused the request (HTTP 400): injected"
        ],
        'upload_folder("card", "lab/new", "x")': ["lab/new: upload failed: Invalid metadata in README.md. - no"],
        'upload_folder("empty", "lab/new", "x")': ["has no files"],
        'upload_folder("none", "lab/new", "x")': ["none: upload failed: no such folder"],
        f'upload_folder("my export", "lab/new@{"0a" * 20}", "x")': ["is a commit"],
        "waits": [],
    }
    answers = hub.ask(*asked, setup=NO_WAITS)
    for (call, words), answer in zip(asked.items(), answers, strict=True):
        for word in words:
            assert word in answer, call
        if "my export" in call and "@0a" not in call:
            assert re.search(r"/my export is kept; to upload it by hand: hf upload la[bp]/\w+ '", answer), call
    assert answers[-1] == []
    assert hub.repositories["lap/there"].files() == {}
    assert not any("x" in repository.messages() for repository in hub.repositories.values())


def test_weights_of_an_earlier_export_are_deleted_in_the_same_commit(hub, export):
    old = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
    old |= {"model.safetensors.index.json": b"{}", "adapter.safetensors": b"other"}
    repository = hub.add("lab/there", {**old, "README.md": b"about"})
    hub.ask('upload_folder("my export", "lab/there", "in one file")', HF_TOKEN=hub.token)
    assert repository.messages() == ["in one file", "first"]
    assert repository.files() == export | {"adapter.safetensors": b"other"}
