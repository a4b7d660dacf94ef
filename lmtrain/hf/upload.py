"""Exports on the Hugging Face hub: the repository is made if there is none, and a folder arrives in one commit."""

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

# Seconds before each further attempt. huggingface_hub repeats some requests by itself, but not the commit.
_WAITS = (2.0, 8.0, 30.0)

# Of an earlier export in fewer or more files; left there, it could be what others load.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")

# Seconds without a sign of life; huggingface_hub itself would wait for ever.
_CHECK_SECONDS = 15.0
_UPLOAD_SECONDS = 300.0


def check_upload(ref: str) -> None:
    """Before hours of work: can an export go to `owner/name[@branch]`? Raises `UserError` if not.

    Asks the hub who the token belongs to; changes nothing there.
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
            f"{ref}: an upload would fail: the token may only read; make one with write access at {settings}"
        )
    owners = [account.get("name", ""), *(group.get("name", "") for group in account.get("orgs", []))]
    if role == "write" and owner and owner.casefold() not in map(str.casefold, owners):  # others may not list them all
        raise UserError(
            f"{ref}: an upload would fail: the token is of {owners[0]}, who is not {owner} and no member of it; "
            f"it can write to {', '.join(owners)}"
        )


def upload_folder(folder: str, ref: str, message: str) -> str:
    """Put all files of `folder` into the model repository `owner/name[@branch]`, in one commit; return its URL.

    A missing repository is created, as open as the hub makes new ones for that owner, and a missing branch from main;
    an existing repository keeps who may see it, and the files that the folder lacks, but for old weights. If nothing
    differs there is no commit, and the URL is that of the last. What may pass is tried again. Raises `UserError` in the
    end; the folder is only read.
    """
    repository, branch = _parse_target(ref)
    folder = os.path.abspath(os.path.expanduser(folder))
    files = _list_files(folder)
    if not files:
        raise UserError(f"{ref}: cannot be uploaded to: {folder} has no files")
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
                raise UserError(f"{ref}: cannot be uploaded to: {reason}\n  {by_hand}") from None
            wait = waits.pop(0)
            log.warning("%s: the upload failed: %s; next attempt in %g s", ref, reason.splitlines()[0], wait)
        time.sleep(wait)


def _upload(folder: str, files: list[str], repository: str, branch: str | None, message: str, token: str) -> str:
    """Can be repeated: what has arrived is found there and not sent again."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session

    hide_progress_from_files()
    get_session().timeout = _UPLOAD_SECONDS
    api = HfApi(token=token)
    repository = api.create_repo(repository, exist_ok=True).repo_id  # with its owner
    if branch not in (None, "main") and not branch.startswith("refs/"):
        api.create_branch(repository, branch=branch, exist_ok=True)
    # not upload_folder, which makes several commits of what it thinks is much
    additions = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=os.path.join(folder, file)) for file in files]
    there = api.list_repo_files(repository, revision=branch)
    old = [CommitOperationDelete(path_in_repo=file) for file in there if _WEIGHTS.fullmatch(file) and file not in files]
    url: str = api.create_commit(repository, [*additions, *old], commit_message=message, revision=branch).commit_url
    return url


def _parse_target(ref: str) -> tuple[str, str | None]:
    repository, branch = parse_ref(ref)
    if branch and re.fullmatch(r"[0-9a-f]{40}", branch):
        raise UserError(f"{ref}: {branch} is a commit, and uploads go to a branch; write {repository}@branch")
    return repository, branch


def _need_token(ref: str) -> str:
    """The token. Raises `UserError` if there is none, or no way to the hub."""
    if not prepare_hub():
        raise UserError(f"{ref}: cannot be uploaded to: {offline_reason()}")
    token = find_token()
    if token is None:
        advice = f"set HF_TOKEN to a token with write access from {endpoint()}/settings/tokens"
        raise UserError(f"{ref}: cannot be uploaded to without a token\n  {advice}")
    return token


def _list_files(folder: str) -> list[str]:
    """Names below `folder`, sorted; without the folders that git and huggingface_hub keep for themselves."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: cannot be uploaded: no such folder")
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".git", ".cache")]
        names += [os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/") for name in files]
    return sorted(names)


def _by_hand(folder: str, repository: str, branch: str | None, message: str) -> str:
    to = ["--revision", branch] if branch else []
    command = shlex.join(["hf", "upload", repository, folder, ".", *to, "--commit-message", message])
    return f"{folder} is kept; to upload it by hand: {command}"
