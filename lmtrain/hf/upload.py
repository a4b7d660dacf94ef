"""Uploads of exports to the Hugging Face Hub: creates the repository if missing, and uploads a folder in one commit."""

import os
import re
import shlex
import time

from lmtrain.config.errors import UserError
from lmtrain.hf.hub import (
    endpoint,
    explain,
    find_token,
    hide_progress_from_files,
    may_pass,
    offline_reason,
    parse_ref,
    prepare_hub,
)
from lmtrain.runtime.logging import log

# Seconds before each retry. huggingface_hub retries some requests automatically, but not the commit.
_WAITS = (2.0, 8.0, 30.0)

# Weight files. Those of an earlier export are deleted, since others might load them.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")

# Timeouts in seconds without a response; huggingface_hub itself would wait forever.
_CHECK_SECONDS = 15.0
_UPLOAD_SECONDS = 300.0


def check_upload(ref: str) -> None:
    """Check early that an export can be uploaded to `owner/name[@branch]`. Raises `UserError` if not.

    Reads the owner and the role of the token from the Hub; changes nothing there.
    """
    owner = _parse_target(ref)[0].rpartition("/")[0]
    token = _need_token(ref)
    from huggingface_hub import HfApi, get_session

    get_session().timeout = _CHECK_SECONDS
    try:
        account = HfApi(token=token).whoami()
    except Exception as error:
        raise UserError(f"{ref}: an upload would fail: {explain(error, ref)}") from None
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    settings = f"{endpoint()}/settings/tokens"
    if role == "read":
        raise UserError(
            f"{ref}: an upload would fail: the token is read-only; create one with write access at {settings}"
        )
    owners = [account.get("name", ""), *(group.get("name", "") for group in account.get("orgs", []))]
    if (
        role == "write" and owner and owner.casefold() not in map(str.casefold, owners)
    ):  # tokens of other roles may not list all owners
        raise UserError(
            f"{ref}: an upload would fail: the token belongs to {owners[0]}, not to {owner} or a member of it; "
            f"it can write to {', '.join(owners)}"
        )


def upload_folder(folder: str, ref: str, message: str) -> str:
    """Put all files of `folder` into the model repository `owner/name[@branch]`, in one commit; return its URL.

    A missing repository is created with the owner's default visibility, and a missing branch from main. An existing
    repository keeps its visibility and the files that the folder lacks, except for old weights. If nothing differs,
    there is no commit, and the URL is that of the last one. Transient errors are retried; other errors raise
    `UserError`. The folder is only read.
    """
    repository, branch = _parse_target(ref)
    folder = os.path.abspath(os.path.expanduser(folder))
    files = _list_files(folder)
    if not files:
        raise UserError(f"{ref}: upload failed: {folder} has no files")
    try:
        token = _need_token(ref)
    except UserError as error:
        raise UserError(f"{error}\n  {_by_hand(folder, repository, branch, message)}") from None
    waits = list(_WAITS)
    while True:
        try:
            return _upload(folder, files, repository, branch, message, token)
        except Exception as error:
            reason = explain(error, ref)
            if not (waits and may_pass(error)):
                by_hand = _by_hand(folder, repository, branch, message)
                raise UserError(f"{ref}: upload failed: {reason}\n  {by_hand}") from None
            wait = waits.pop(0)
            log.warning("%s: upload failed: %s; retrying in %g s", ref, reason.splitlines()[0], wait)
        time.sleep(wait)


def _upload(folder: str, files: list[str], repository: str, branch: str | None, message: str, token: str) -> str:
    """Upload once. Can be repeated, since files that the Hub already has are not sent again."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session

    hide_progress_from_files()
    get_session().timeout = _UPLOAD_SECONDS
    api = HfApi(token=token)
    repository = api.create_repo(repository, exist_ok=True).repo_id  # includes the owner
    if branch not in (None, "main") and not branch.startswith("refs/"):
        api.create_branch(repository, branch=branch, exist_ok=True)
    # not upload_folder, which splits large folders into several commits
    additions = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=os.path.join(folder, file)) for file in files]
    existing = api.list_repo_files(repository, revision=branch)
    old = [
        CommitOperationDelete(path_in_repo=file) for file in existing if _WEIGHTS.fullmatch(file) and file not in files
    ]
    url: str = api.create_commit(repository, [*additions, *old], commit_message=message, revision=branch).commit_url
    return url


def _parse_target(ref: str) -> tuple[str, str | None]:
    repository, branch = parse_ref(ref)
    if branch and re.fullmatch(r"[0-9a-f]{40}", branch):
        raise UserError(f"{ref}: {branch} is a commit, but uploads require a branch; use {repository}@branch")
    return repository, branch


def _need_token(ref: str) -> str:
    """Token for uploads. Raises `UserError` if there is none or the Hub cannot be reached."""
    if not prepare_hub():
        raise UserError(f"{ref}: upload failed: {offline_reason()}")
    token = find_token()
    if token is None:
        advice = f"set HF_TOKEN to a token with write access from {endpoint()}/settings/tokens"
        raise UserError(f"{ref}: upload requires a token\n  {advice}")
    return token


def _list_files(folder: str) -> list[str]:
    """Files below `folder`, sorted, without the internal folders of git and huggingface_hub."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: upload failed: no such folder")
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".git", ".cache")]
        names += [os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/") for name in files]
    return sorted(names)


def _by_hand(folder: str, repository: str, branch: str | None, message: str) -> str:
    to = ["--revision", branch] if branch else []
    command = shlex.join(["hf", "upload", repository, folder, ".", *to, "--commit-message", message])
    return f"{folder} is kept; to upload it by hand: {command}"
