"""The files that paths and URLs with braces and globs stand for, and the formats that their names say."""

import glob
import os
import stat
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from braceexpand import braceexpand

from lmtrain.preprocess.formats import READERS
from lmtrain.preprocess.token_sources import EXTENSIONS, is_cache, is_in_place
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import log
from lmtrain.runtime.remote import is_missing, open_fs, remote_errors, without_query
from lmtrain.runtime.storage import is_url
from lmtrain.runtime.text import require_utf8_name

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_UNCOMPRESSED = (".parquet", ".arrow")
_WILDCARDS = "*?["


def expand_urls(urls: list[str], of_tokens: bool = False) -> list[str]:
    """Expand braces, then globs, in the order written. Raises `UserError` with all URLs that match nothing.

    `of_tokens`: they may also be files of token ids, and folders of token caches.
    """
    files: list[str] = []
    missing: list[str] = []
    for url in urls:
        try:
            names = list(braceexpand(os.path.expanduser(url)))
        except ValueError:  # UnbalancedBracesError, which the package does not export to type checkers
            raise UserError(f"{url}: unbalanced braces") from None
        for name in names:
            matches = [name] if of_tokens and is_cache(name) else _matches(name, of_tokens)
            files.extend(matches)
            if not matches:
                missing.append(name)
    if missing:
        raise FilesMissingError("no such file: " + ", ".join(map(_with_similar, missing)))
    by_file: dict[str, list[str]] = {}
    for name in files:
        by_file.setdefault(name if is_url(name) else os.path.realpath(name), []).append(name)
    repeated = sorted(" = ".join(dict.fromkeys(names)) for names in by_file.values() if len(names) > 1)
    if repeated:
        raise UserError("listed more than once: " + ", ".join(repeated))
    for name in files:
        require_utf8_name(name, "rename the file or folder")
        if not of_tokens or not (is_in_place(name) or is_cache(name)):
            format_of(name)
    return files


class FilesMissingError(UserError):
    """Input files that are missing, or whose secrets are; a finished cache does not need them."""


def _with_similar(name: str) -> str:
    """A missing file, with the one that may be meant: Megatron-LM names its files without extension."""
    return f"{name} (but there is {name}.bin)" if not is_url(name) and os.path.isfile(f"{name}.bin") else name


def _matches(name: str, of_tokens: bool) -> list[str]:
    """The files of a path, or of a pattern, sorted. Hidden files and folders match as in a shell."""
    if not is_url(name) and os.path.isfile(name):
        return [name]
    with remote_errors(name, "read"):
        fs, path = open_fs(name)
        # first, since a file name may contain glob characters
        if (kind := _kind_of(name, fs, path)) is not None:
            return [name] if kind == "file" else _not_a_file(name, kind, fs, path)
        if not any(sign in without_query(path) for sign in _WILDCARDS):
            return []
        if any("**" in part and part != "**" for part in path.split("/")):
            raise UserError(f"{name}: ** stands for any folders, between slashes; write **/*")
        found = _glob(name, fs, path)
        shown = {match: kind for match, kind in found.items() if not _is_hidden(match, path)}
        if hidden := sum(kind == "file" for kind in (found | dict.fromkeys(shown, "")).values()):
            log.info(
                f"{name}: without {counted(hidden, 'hidden file')} (a file or folder whose name starts with a dot)"
            )
        files = []
        for match, kind in sorted(shown.items()):
            full = fs.unstrip_protocol(match) if is_url(name) else match
            if kind == "file" or (kind == "directory" and of_tokens and is_cache(full)):
                files.append(full)
            elif kind != "directory" or (_ending(full) and not any(other.startswith(f"{match}/") for other in shown)):
                _not_a_file(full, kind, fs, match)
        return files


def _glob(name: str, fs: Any, path: str) -> dict[str, str]:
    """What a pattern matches, hidden files too, and the kind of each."""
    if is_url(name):
        try:
            return {match: info["type"] for match, info in fs.glob(path, detail=True).items()}
        except FileNotFoundError:  # the bucket
            return {}
    # fsspec's own takes links for no files. It returns the folder before ** with a slash at its end
    matches = (match for match in glob.iglob(path, recursive=True, include_hidden=True) if not match.endswith("/"))
    return {match: kind for match in matches if (kind := _kind_of(match, fs, match)) is not None}


def _kind_of(name: str, fs: Any, path: str) -> str | None:
    """What is at a path: "file", "directory", or in words what else; None if there is nothing."""
    try:
        if is_url(name):  # not `isfile`, which hides that access is denied
            return str(fs.info(path)["type"])
        mode = os.stat(name).st_mode
    except FileNotFoundError as error:
        if os.path.islink(name):
            return f"a link to {os.readlink(name)}, which does not exist"
        if not is_missing(error):
            raise
        return None
    except NotADirectoryError:
        return None
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _not_a_file(name: str, kind: str, fs: Any, path: str) -> list[str]:
    """Raise `UserError` for what is no file and says what to do instead."""
    if kind.startswith("a link"):
        raise FilesMissingError(f"{name}: {kind}")
    if kind != "directory":
        raise UserError(f"{name}: {kind}; text is read from files only, more than once: write it to one")
    entries = [entry for entry in fs.find(path, maxdepth=3) if not _is_hidden(entry, f"{path.rstrip('/')}/**")]
    endings = Counter(ending for entry in entries if (ending := _ending(entry)))
    if not endings:
        raise UserError(f"{name}: is a folder, without files of a supported format in it")
    ending = max(endings, key=lambda ending: (ending in _UNCOMPRESSED, endings[ending]))
    places = {entry.rpartition("/")[0].strip("/") for entry in entries if _ending(entry) == ending}
    pattern = "*" if places == {path.strip("/")} else "**/*"
    raise UserError(f"{name}: is a folder; set the files in it, such as '{name.rstrip('/')}/{pattern}{ending}'")


def _ending(name: str) -> str:
    """The end of the name of a file of a supported format, such as .jsonl.gz; "" for others."""
    try:
        extension, _ = format_of(name)
    except UserError:
        return ""
    return name[name.rindex(extension) :]


def _is_hidden(path: str, pattern: str) -> bool:
    """Whether a part of a path starts with a dot, and none of the pattern's own with a dot matches it."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if any(sign in part for sign in _WILDCARDS))
    dotted = [part for part in parts[first:] if part.startswith(".")]
    hidden = (part for part in path.split("/")[first:] if part.startswith("."))
    return any(not any(fnmatchcase(part, own) for own in dotted) for part in hidden)


def format_of(url: str) -> tuple[str, str | None]:
    """Extension and compression of an input file. Raises `UserError` for an unsupported format."""
    stem, extension = os.path.splitext(without_query(url))
    if extension not in READERS and extension not in COMPRESSIONS:
        stem, extension = os.path.splitext(url)  # such as download?file=a.jsonl
    compression = COMPRESSIONS.get(extension)
    if compression:
        extension = os.path.splitext(stem)[1]
    if extension not in READERS or (compression and extension in _UNCOMPRESSED):
        readable = f"{' '.join(READERS)}, and all but {' '.join(_UNCOMPRESSED)} with {' '.join(COMPRESSIONS)} after it"
        if extension == ".idx":
            raise UserError(f"{url}: an index; set the .bin next to it, with data.format: {{type: tokens}}")
        advice = f"; for files of token ids ({' '.join(EXTENSIONS)}) set data.format: {{type: tokens}}"
        raise UserError(
            f"{without_query(url)}: unsupported format (supported: {readable}"
            f"{advice if extension in EXTENSIONS else ''})"
        )
    return extension, compression
