"""An export reaches the hub whole and in one commit, or stays where it is and says what to do."""

import hashlib
import json
import re
import shlex

import pytest
from hf.fake_hub import Account

WEIGHTS = bytes(range(256)) * 300

# Waits take no time, and are listed.
NO_WAITS = "import time\nwaits = []\ntime.sleep = waits.append"


@pytest.fixture
def export(hub):
    """Files of a folder `my export`, by their names; beside them others that are nobody's business."""
    files = {"config.json": b"{}\n", "model.safetensors": WEIGHTS, "README.md": b"# A card\n", "sub/empty.txt": b""}
    folder = hub.home / "my export"
    for name, content in {**files, ".git/HEAD": b"ref", ".cache/huggingface/x": b"x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


def committed(request) -> dict[str, str]:
    """Names in the body of a commit, and how their contents came."""
    lines = [json.loads(line) for line in request.body.splitlines()]
    return {line["value"]["path"]: line["key"] for line in lines if line["key"] != "header"}


def test_a_folder_arrives_in_one_commit(hub, export):
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
    assert new.files() == {**export, "config.json": b"[]\n"} | attributes  # what the folder lacks stays

    wish = json.loads(hub.asked("/repos/create")[0].body)
    assert (wish["organization"], wish["name"]) == ("lab", "new")
    assert not {"private", "visibility"} & wish.keys()  # as the owner has set it on the hub
    kinds = dict.fromkeys(export, "file") | {"model.safetensors": "lfsFile"}
    assert [committed(request) for request in hub.asked("/commit/")] == [kinds, {"config.json": "file"}]
    assert [request.line.split()[0] for request in hub.requests if request.storage] == ["PUT"]
    assert {r.headers.get("authorization") for r in hub.requests if not r.storage} == {f"Bearer {hub.token}"}


def test_a_branch_is_made_once_and_an_existing_repository_keeps_what_it_is(hub, export):
    there = hub.add("lab/there", {"old.txt": b"old"}, private=True)
    main = there.branches["main"]
    urls = hub.ask(
        'upload_folder("my export", "lab/there@runs/10", "ten")',
        """Path("my export/config.json").write_bytes(b"[]\\n")""",
        f'use_token("{hub.token}", "HUGGING_FACE_HUB_TOKEN")',
        'upload_folder("my export", "lab/there@runs/10", "again")',
        'upload_folder("my export", "mine@main", "ten")',  # without an owner it is the token's
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


def test_whether_an_upload_can_succeed_is_known_before_the_work(hub, export):
    hub.accounts["hf_ofAReader"] = Account("somebody", role="read")
    hub.accounts["hf_fineGrained"] = Account("somebody", role="fineGrained")
    fails = "an upload would fail: "
    settings = f"{hub.url}/settings/tokens"
    asked = {
        'check_upload("lab/new")': ["without a token", f"set HF_TOKEN to a token with write access from {settings}"],
        f'use_token("{hub.token}")': [],
        'check_upload("lab/other")': [],
        'check_upload("Somebody/new@step-10")': [],
        'check_upload("new")': [],
        'check_upload("a/b/c")': ["'a/b/c'", "write owner/name"],
        f'check_upload("lab/new@{"0a" * 20}")': ["is a commit, and uploads go to a branch; write lab/new@branch"],
        'check_upload("lap/new")': [f"{fails}the token is of somebody, who is not lap", "can write to somebody, lab"],
        'use_token("hf_fineGrained")': [],
        'check_upload("lap/other")': [],  # such tokens do not tell all they may
        'use_token("hf_ofAReader")': [],
        'check_upload("somebody/new")': [f"{fails}the token may only read; make one with write access at {settings}"],
        'use_token("hf_ofNobody")': [],
        'check_upload("lab/x")': [f"{fails}the hub does not know the token in HF_TOKEN", f"a new one at {settings}"],
        'use_token("hf_two words")': [],
        'check_upload("lab/y")': ["HF_TOKEN holds letters or spaces that no token has"],
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

    # A hub that is silent, out of order, or not there.
    hub.fail("hang")
    hub.fail(502)
    short = "import lmtrain.hf.upload\nlmtrain.hf.upload._CHECK_SECONDS = 1"
    check = 'check_upload("lab/new")'
    silent, broken = hub.ask(check, check, setup=short, HF_TOKEN=hub.token)
    assert f"lab/new: {fails}timed out" in silent
    assert f"lab/new: {fails}Hub server error (HTTP 502)" in broken
    hub.requests.clear()
    upload = 'upload_folder("my export", "lab/new", "x")'
    reason = "lab/new: cannot be uploaded to: http://127.0.0.1:9 cannot be reached (Connection refused)"
    gone, kept = hub.ask(check, upload, HF_TOKEN=hub.token, HF_ENDPOINT="http://127.0.0.1:9")
    assert gone == f"UserError: {reason}"
    assert kept.startswith(
        f"UserError: {reason}\n  {hub.home}/my export is kept; to upload it by hand: hf upload lab/new "
    )
    (offline,) = hub.ask(check, HF_TOKEN=hub.token, HF_HUB_OFFLINE="1")
    assert offline == "UserError: lab/new: cannot be uploaded to: HF_HUB_OFFLINE is set"
    assert hub.requests == []


def test_what_passes_is_tried_again_and_makes_no_second_commit(hub, export):
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
        f"{NO_WAITS}\nfrom lmtrain.hf.upload import upload_folder\n"
        "import lmtrain.hf.upload as module\nmodule._WAITS, module._UPLOAD_SECONDS = (1.5, 2.5, 3.5, 4.5, 5.5), 2\n"
        'print(upload_folder("my export", "lab/new@b", "step 10"), [wait for wait in waits if wait % 1])',
        HF_TOKEN=hub.token,
    )
    new = hub.repositories["lab/new"]
    assert done.stdout.strip() == f"{hub.url}/lab/new/commit/{new.branches['b']} [1.5, 2.5, 3.5, 4.5, 5.5]", done.stderr
    assert "lab/new@b: the upload failed: Hub server error (HTTP 503)" in done.stderr
    assert new.messages("b") == ["step 10", "first"]
    assert {**new.files("b"), **export} == new.files("b")
    assert len(hub.asked("PUT ")) == 2  # the first was refused; what has arrived is not sent again
    assert len(hub.asked("/commit/")) == 2  # the second was made, and then found to be there
    assert hub.token not in done.stdout + done.stderr
    assert hub.leaks(hub.token) == []


def test_what_does_not_pass_leaves_the_folder_and_says_how_to_upload_it(hub, export):
    upload = 'upload_folder("my export", "lab/new@b", "step 10")'
    hub.fail(503, 4, "/commit/")
    folder = hub.home / "my export"
    answer, waits = hub.ask(upload, "waits", setup=NO_WAITS, HF_TOKEN=hub.token)
    assert answer.startswith(
        "UserError: lab/new@b: cannot be uploaded to: Hub server error (HTTP 503); try again later\n"
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


def test_what_can_never_succeed_is_not_tried_again(hub, export):
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
            "lab/new: cannot be uploaded to without a token",
            "set HF_TOKEN",
        ],
        'use_token("hf_ofNobody")': [],
        'upload_folder("my export", "lab/old", "x")': ["the hub does not know the token in HF_TOKEN"],
        begin: [],
        'upload_folder("my export", "lap/there", "x")': ["the token in HF_TOKEN lacks permission", "Bearer ***"],
        'upload_folder("my export", "lap/none", "x")': ["the token in HF_TOKEN lacks permission", "Bearer ***"],
        'upload_folder("my export", "lab/new@refs/pr/9", "x")': ["it has no revision 'refs/pr/9'"],
        'upload_folder("my export", "lab/bad", "x")': [
            "lab/bad: cannot be uploaded to: the hub refuses (400): ordered by a test\n"
        ],
        'upload_folder("my export", "lab/odd", "x")': [
            f"answers at {hub.url} is not a Hugging Face Hub, or an incompatible version"
        ],
        'upload_folder("more", "lab/new", "x")': ["lab/new: cannot be uploaded to: the hub refuses (400): ordered by"],
        'upload_folder("card", "lab/new", "x")': [
            "lab/new: cannot be uploaded to: Invalid metadata in README.md. - no"
        ],
        'upload_folder("empty", "lab/new", "x")': ["has no files"],
        'upload_folder("none", "lab/new", "x")': ["none: cannot be uploaded: no such folder"],
        f'upload_folder("my export", "lab/new@{"0a" * 20}", "x")': ["is a commit, and uploads go to a branch"],
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


def test_weights_of_an_earlier_export_in_other_files_go_in_the_same_commit(hub, export):
    old = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
    old |= {"model.safetensors.index.json": b"{}", "adapter.safetensors": b"other"}
    repository = hub.add("lab/there", {**old, "README.md": b"about"})
    hub.ask('upload_folder("my export", "lab/there", "in one file")', HF_TOKEN=hub.token)
    assert repository.messages() == ["in one file", "first"]
    assert repository.files() == export | {"adapter.safetensors": b"other"}
