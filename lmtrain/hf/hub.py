"""Hugging Face Hub: reachability, downloads of model files, uploads of exports, and explanations of its errors.

Tokens are read by huggingface_hub: HF_TOKEN, the older HUGGING_FACE_HUB_TOKEN, or the file of `hf auth login`. Messages
never contain a token.
"""

import functools
import json
import os
import re
import shlex
import socket
import sys
import time
import urllib.parse
import urllib.request

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log

_CONNECT_SECONDS = 3.0

_NAME = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REF = re.compile(rf"((?:{_NAME}/)?{_NAME})(?:@([^\s@~^:?*\[\\]+))?", re.ASCII)


def prepare_hub() -> bool:
    """Whether the Hub can be reached; if not, its libraries are in offline mode from then on, and use their cache.

    Call this before the first import of huggingface_hub, transformers or datasets in a process: they read
    HF_HUB_OFFLINE only at import, and without it retry for half a minute.
    """
    return not offline_reason()


@functools.cache
def offline_reason() -> str:
    """Why the Hub is not used; empty if it can be reached, which is checked once in a process, as in `prepare_hub`."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # such as that models require PyTorch
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # the second is read only if the first is not set
        if value := os.environ.get(name, ""):
            if value.upper() in ("1", "TRUE", "YES", "ON"):
                return f"{name} is set"
            break
    try:
        socket.create_connection(_first_hop(), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return f"{endpoint()} cannot be reached ({getattr(error, 'strerror', None) or error})"
    return ""


def endpoint() -> str:
    """URL of the Hub; HF_ENDPOINT changes it."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def parse_ref(ref: str) -> tuple[str, str | None]:
    """Split `owner/name@revision` into ("owner/name", "revision"); the owner and the revision are optional.

    Raises `UserError` for an invalid repository name.
    """
    match = _REF.fullmatch(ref)
    if not match or "--" in match[1] or ".." in ref or match[1].endswith(".git"):
        raise UserError(f"{ref!r}: invalid Hub repository; expected owner/name or owner/name@revision")
    return match[1], match[2]


def fetch_file(ref: str, name: str) -> str | None:
    """Local path of the file `name` of a model repository, downloaded unless it is in huggingface_hub's cache.

    None if the repository has no such file. Offline, the cache is used without delay. Raises `UserError` if the Hub
    refuses, if the repository or revision is not found, and if the file is not in the cache while offline.
    """
    repository, revision = parse_ref(ref)
    reason = offline_reason()
    import huggingface_hub
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if not reason:
        find_token()
        hide_progress_from_files()
        try:
            path: str = huggingface_hub.hf_hub_download(repository, name, revision=revision)
            return path
        except RemoteEntryNotFoundError:
            return None
        except Exception as error:  # httpx, hf_xet and file system errors have no common base class
            reason = explain(error, ref)
            if not may_pass(error):
                raise UserError(f"{ref}: {name} cannot be read from the hub: {reason}") from None
    cached = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(cached, str):
        return cached
    if cached is not None or _is_unlisted(repository, revision, name):
        return None  # known to be missing in the repository
    raise UserError(f"{ref}: {name} cannot be read from the hub: {reason}\n  {_instead(ref)}")


def find_token() -> str | None:
    """Token that huggingface_hub will send. Raises `UserError` for an invalid one, without showing it."""
    from huggingface_hub import get_token

    token: str | None = get_token()
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise UserError(
            f"{_token_place()} has characters that are invalid in a token; copy it again from {_settings()}"
        )
    return token


def hide_progress_from_files() -> None:
    """Disable progress bars of huggingface_hub in a log file, where each update would be a line."""
    if not sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()


def may_pass(error: Exception) -> bool:
    """Whether a retry of the request may succeed: network errors and server errors of the Hub."""
    from huggingface_hub.errors import HfHubHTTPError

    error = _within(error)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 412, 429) or error.response.status_code >= 500
    if isinstance(error, OSError):
        return error.errno is None  # an errno means a local error: disk full, file not found
    return not isinstance(error, ValueError | TypeError | AttributeError | LookupError)


def explain(error: Exception, ref: str) -> str:
    """Explain an error of huggingface_hub for `ref`: the reason in one line, or with advice in a second line."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    repository, revision = parse_ref(ref)
    error = _within(error)
    place = f"{endpoint()}/{repository}"
    if isinstance(error, GatedRepoError):
        advice = f"request access at {place}, and set HF_TOKEN to a token of the account that has it"
        return f"gated repository\n  {advice}"
    if isinstance(error, RepositoryNotFoundError):
        who = "your token has no access" if _has_token() else "requires a token"
        advice = "check the spelling; for a private one set HF_TOKEN to a token of an account with read access"
        return f"repository not found, or it is private and {who}\n  {advice}"
    if isinstance(error, RevisionNotFoundError):
        return f"unknown revision {revision or 'main'!r}\n  see its branches at {place}/tree/main"
    if isinstance(error, json.JSONDecodeError | LookupError):
        what = f"{type(error).__name__}: {error}"
        return f"unexpected response: {endpoint()} is not a Hugging Face Hub, or an incompatible version ({what})"
    if not isinstance(error, HfHubHTTPError):
        return _in_short(error)
    status = error.response.status_code
    said = f": {_in_short(error.server_message)}" if error.server_message else ""
    if status in (401, 403) and not _has_token():
        return f"authentication required{said}\n  set HF_TOKEN to a token from {_settings()}"
    if status == 401:
        return f"invalid token in {_token_place()} (HTTP 401)\n  create a new one at {_settings()}"
    if status == 403:
        advice = f"grant the permission at {_settings()}, or set HF_TOKEN to a token of another account"
        return f"the token in {_token_place()} lacks permission (HTTP 403){said}\n  {advice}"
    if status == 429:
        return "rate limit exceeded (HTTP 429); try again later"
    if status >= 500:
        return f"Hub server error (HTTP {status}); try again later"
    return f"the Hub refused the request (HTTP {status}){said}"


def _first_hop() -> tuple[str, int]:
    """Host and port to connect to: those of the proxy if the environment sets one, otherwise those of the Hub."""
    url = urllib.parse.urlsplit(endpoint())
    if not url.hostname:
        raise ValueError("HF_ENDPOINT is not a URL")
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(url.hostname):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "", url.port or {"https": 443, "socks5": 1080}.get(url.scheme, 80)


def _is_unlisted(repository: str, revision: str | None, name: str) -> bool:
    """Whether the cache has a list of the repository's files (from a full download) without `name`."""
    import huggingface_hub

    read_list = getattr(huggingface_hub, "get_cached_repo_tree", None)  # missing in early versions
    if read_list is None:
        return False
    try:
        return name not in {file.path for file in read_list(repository, revision=revision)}
    except huggingface_hub.errors.CachedRepoTreeNotFoundError:
        return False


def _instead(ref: str) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    repository, revision = parse_ref(ref)
    command = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
    return (
        f"it is not in the cache {HF_HUB_CACHE} either: use a local folder instead, or run `{command}` on a machine "
        "with network access and set HF_HOME to the cache that it fills"
    )


def _in_short(message: object) -> str:
    """A foreign message in one line, with the token removed."""
    from huggingface_hub import get_token

    text = str(message).replace(get_token() or "\n", "***")
    return " ".join(text.split())[:500] or type(message).__name__


def _within(error: Exception) -> Exception:
    """The original error if huggingface_hub wrapped it in a less specific one."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while type(error) in (LocalEntryNotFoundError, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _token_place() -> str:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            return name
    return "the file that `hf auth login` wrote"


def _settings() -> str:
    return f"{endpoint()}/settings/tokens"


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
    if role == "read":
        raise UserError(
            f"{ref}: an upload would fail: the token is read-only; create one with write access at {_settings()}"
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
        advice = f"set HF_TOKEN to a token with write access from {_settings()}"
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
