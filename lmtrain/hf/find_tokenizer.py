"""Resolution of `data.tokenizer` to a local folder with a `tokenizer.json`, the only form that the rest reads.

    a folder, or one at a URL that fsspec opens     used directly; a URL is copied once
    a file: `tokenizer.json` or another *.json      its folder, or a new folder with a copy of the file
    `vocab.json` with `merges.txt` next to it       converted; the original format of GPT-2
    a Hugging Face id, `owner/name[@revision]`      downloaded from the hub once
    a sentencepiece file, `*.model`                 converted
    `byte`                                          256 bytes and an end-of-text token

`passthrough` has no folder, since its documents are token ids.

Copies and conversions are stored in the user's cache folder, named by a hash of their content or by the hub id. An
existing local file or folder takes precedence over a hub id.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from lmtrain.hf.chat_template import read_templates
from lmtrain.hf.hub import prepare_hub
from lmtrain.hf.special_tokens import (
    ADDED_TOKENS_FILE,
    SPECIAL_TOKENS_FILE,
    DeclaredTokens,
    add_declared,
    read_declared,
    read_settings,
)
from lmtrain.hf.tokenizer import (
    MODEL_FILE,
    TOKENIZER_FILES,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
    similar_folder,
)
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.storage import UNUSED_SECONDS, read_bytes, remove_temporaries, write_bytes
from lmtrain.runtime.text import require_utf8_name

PASSTHROUGH = "passthrough"

# Before a change of what the folders hold, this is another number.
_VERSION = 4
_PAIR = ("vocab.json", "merges.txt")
_GPT2_END = "<|endoftext|>"
_HUB_ID = re.compile(r"(?:[\w.-]+/)?[\w.-]+(?:@[\w./-]+)?")


def find_tokenizer(name: str) -> str:
    """Folder of the tokenizer `name`. Raises `UserError` if it is not found or unavailable."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _in_folder(name)
    if name == "byte":
        return _once("byte", _write_byte_tokenizer)
    if name.endswith(".model"):
        return _from_sentencepiece(name)
    if "://" in name:
        return _from_url(name.removesuffix("/tokenizer.json"))
    if os.path.isfile(path):
        return _from_file(name)
    if name.endswith((".json", ".txt")):
        raise UserError(f"tokenizer {name!r}: no such file; set data.tokenizer to an existing file or folder")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise UserError(
        f"tokenizer {name!r}: no such folder; make one with `lmtrain tokenizer train --output {name} FILES`, "
        "or set data.tokenizer to an existing folder"
    )


def open_tokenizer(name: str, vocab_size: int | None = None) -> Tokenizer:
    """Find the tokenizer `name` and load it. `vocab_size` is used for passthrough only."""
    if name == PASSTHROUGH:
        assert vocab_size is not None
        return Tokenizer(
            path=PASSTHROUGH, library=None, vocab_size=vocab_size, eos_id=None, bos_id=None, fingerprint=PASSTHROUGH
        )
    return load_tokenizer(find_tokenizer(name))


def open_in_transformers(name: str) -> Any:
    """The tokenizer `name` as transformers loads it, including its chat template."""
    folder = find_tokenizer(name)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # only local files: the hub is not asked

    path = os.path.expanduser(folder)
    if os.path.isfile(os.path.join(path, "tokenizer_config.json")):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return PreTrainedTokenizerFast(tokenizer_file=os.path.join(path, "tokenizer.json"))


def cache_folder() -> str:
    """Folder of converted tokenizers; XDG_CACHE_HOME moves it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    require_utf8_name(root, "set XDG_CACHE_HOME to another folder")
    return os.path.join(root, "lmtrain", "tokenizers")


def _once(name: str, make: Callable[[str], None]) -> str:
    """Folder `name` in the cache, created atomically by `make(folder)` if it is missing.

    Raises `UserError` if it cannot be written.
    """
    folder = os.path.join(cache_folder(), name)
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        temporary = f"{folder}.tmp-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            os.makedirs(temporary)
            remove_temporaries(cache_folder(), age=UNUSED_SECONDS)
            make(temporary)
            try:
                os.rename(temporary, folder)
            except OSError:  # another process was faster, with the same content
                if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
                    raise
        except OSError as error:
            raise UserError(
                f"{cache_folder()}: a tokenizer cannot be stored: {error.strerror or error}; set XDG_CACHE_HOME to a "
                "folder that can be written"
            ) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_byte_tokenizer(folder: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_GPT2_END])
    save_tokenizer(backend, folder, eos=_GPT2_END, bos=_GPT2_END)


def _byte_of(letter: str) -> int:
    """Byte of a letter of GPT-2's alphabet: printable bytes map to themselves, the others to code points from 256."""
    if ord(letter) < 256:
        return ord(letter)
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [byte for byte in range(256) if byte not in printable][ord(letter) - 256]


def _in_folder(name: str) -> str:
    """A folder with a tokenizer.json is used directly; one with an older format only is converted."""
    has = {file for file in ("tokenizer.json", *_PAIR, "tokenizer.model") if os.path.isfile(_join(name, file))}
    if "tokenizer.json" not in has and has.issuperset(_PAIR):
        return _from_pair(name)
    return _from_sentencepiece(_join(name, "tokenizer.model"), name) if has == {"tokenizer.model"} else name


def _from_file(name: str) -> str:
    folder, file = os.path.split(name)
    if file == "tokenizer.json":
        return folder or "."
    if file in _PAIR:
        missing = [other for other in _PAIR if not os.path.isfile(_join(folder, other))]
        if missing:
            raise UserError(f"tokenizer {name!r}: {missing[0]} is missing in the same folder; both files are required")
        return _from_pair(folder or ".")
    if not file.endswith(".json"):
        raise UserError(
            f"tokenizer {name!r}: unsupported file type; set data.tokenizer to a folder, a tokenizer.json, a "
            "vocab.json with its merges.txt, or a sentencepiece .model"
        )
    return _copied("file", {"tokenizer.json": _read(name)})


def _from_url(url: str) -> str:
    contents = {}
    for file in (*TOKENIZER_FILES, "config.json"):  # which may name the tokenizer's class
        with contextlib.suppress(FileNotFoundError):
            contents[file] = _read(f"{url.rstrip('/')}/{file}", url)
    if "tokenizer.json" not in contents:
        raise UserError(f"tokenizer {url!r}: tokenizer.json not found")
    return _copied("url", contents)


def _copied(kind: str, contents: Mapping[str, bytes]) -> str:
    """A folder in the cache with files of these contents."""

    def write(folder: str) -> None:
        for name, content in contents.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)

    return _once(f"{kind}-{_digest(*(name.encode() + contents[name] for name in sorted(contents)))}", write)


def _from_pair(folder: str) -> str:
    """A byte-level BPE from `vocab.json` and `merges.txt`, as GPT-2 was published."""
    vocab, merges = (os.path.expanduser(_join(folder, file)) for file in _PAIR)
    settings, templates, declared = read_settings(folder), read_templates(folder), read_declared(folder)

    def convert(into: str) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

        try:
            backend = Tokenizer(models.BPE.from_file(vocab, merges))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"tokenizer {folder!r}: invalid {' or '.join(_PAIR)}: {error}") from None
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        end = _GPT2_END if backend.token_to_id(_GPT2_END) is not None else None
        eos, bos = (declared.text(kind) or end for kind in ("eos_token", "bos_token"))
        backend.add_special_tokens(sorted({eos, bos} - {None}))
        _save_declared(backend, into, settings, declared, eos, bos, templates)

    parts = [_read(vocab), _read(merges), *(repr(sorted(part.items())).encode() for part in (settings, templates))]
    return _once(f"pair-{_digest(*parts, *_side_files(folder))}", convert)


def _save_declared(
    backend: Any,
    folder: str,
    settings: Mapping[str, Any],
    declared: DeclaredTokens,
    eos: str | None,
    bos: str | None,
    templates: Mapping[str, str],
    special_text: bool = True,
) -> None:
    """Save a converted tokenizer with the tokens that its original folder declares."""
    add_declared(backend, declared)
    others: dict[str, Any] = {
        name: text for name, text in declared.texts.items() if name not in ("eos_token", "bos_token")
    }
    others |= {"add_bos_token": True} if settings.get("add_bos_token") else {}
    save_tokenizer(backend, folder, eos, bos, special_text, templates, others)


def _side_files(folder: str) -> list[bytes]:
    """Contents of the folder's further files with tokens, which determine a conversion."""
    paths = [_join(folder, name) for name in (SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE)]
    return [_read(path) for path in paths if os.path.isfile(path)]


def _from_hub(name: str) -> str:
    """Load with transformers, which adds what older repositories omit, such as GPT-2's end-of-text token."""
    repository, _, revision = name.partition("@")

    def convert(folder: str) -> None:
        prepare_hub()
        from transformers import AutoTokenizer
        from transformers.utils.hub import cached_file

        try:
            tokenizer = AutoTokenizer.from_pretrained(repository, revision=revision or None, trust_remote_code=False)
            model = cached_file(
                repository,
                MODEL_FILE,
                revision=revision or None,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"tokenizer {name!r}: not found locally or on the Hugging Face Hub: {reason}\n"
                f"  {similar_folder(name)}offline, set data.tokenizer to a folder: a copy, or one made by "
                f"`lmtrain tokenizer train --output {name} FILES`; a gated repository requires HF_TOKEN"
            ) from None
        if not tokenizer.is_fast:
            raise UserError(f"tokenizer {name!r}: no fast tokenizer available; slow tokenizers are not supported")
        if model is not None:
            shutil.copyfile(model, os.path.join(folder, MODEL_FILE))
        written, named = tokenizer.chat_template, tokenizer.special_tokens_map
        save_tokenizer(
            tokenizer.backend_tokenizer,
            folder,
            eos=tokenizer.eos_token,
            bos=tokenizer.bos_token,
            special_text=not tokenizer.split_special_tokens,
            templates={"default": written} if isinstance(written, str) else written,
            others={name: named[name] for name in ("unk_token", "pad_token") if name in named},
        )

    file_name = re.sub(r"[^\w.-]", "--", name)
    return _once(f"hub-{_VERSION}-{file_name}", convert)


def _from_sentencepiece(name: str, folder: str | None = None) -> str:
    """Convert a sentencepiece model for the tokenizers library; the same object tokenizes and is exported.

    `folder` is that of a tokenizer with further files, which may declare other tokens and chat templates.
    """
    content = _read(name)
    settings, templates, side_files = (
        ({}, {}, []) if folder is None else (read_settings(folder), read_templates(folder), _side_files(folder))
    )

    def convert(into: str) -> None:
        from lmtrain.hf.sentencepiece import convert_sentencepiece

        backend, eos, bos = convert_sentencepiece(content, name)
        write_bytes(os.path.join(into, MODEL_FILE), content)
        if folder is None:
            save_tokenizer(backend, into, eos=eos, bos=bos, special_text=False)
            return
        declared = read_declared(folder)
        eos, bos = declared.text("eos_token") or eos, declared.text("bos_token") or bos
        _save_declared(backend, into, settings, declared, eos, bos, templates, special_text=False)

    parts = [repr(sorted(part.items())).encode() for part in (settings, templates) if part]
    return _once(f"sentencepiece-{_VERSION}-{_digest(content, *parts, *side_files)}", convert)


def _join(folder: str, file: str) -> str:
    return os.path.join(os.path.expanduser(folder), file)


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def _read(path: str, tokenizer: str | None = None) -> bytes:
    """Content of a local file or one at a URL. Raises FileNotFoundError if one of a `tokenizer` folder is missing."""
    try:
        with remote_errors(path, "read", missing_too=tokenizer is None):
            return read_bytes(os.path.expanduser(path))
    except UserError as error:
        raise UserError(f"tokenizer {tokenizer or path!r}: {str(error).removeprefix(f'{path}: ')}") from None
