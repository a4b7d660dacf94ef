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
from collections.abc import Callable, Iterator
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.chat_template import read_templates
from lmtrain.hf.hub import prepare_hub
from lmtrain.hf.tokenizer import (
    TOKENIZER_FILES,
    Tokenizer,
    load_tokenizer,
    read_settings,
    save_tokenizer,
    similar_folder,
    token_text,
)

PASSTHROUGH = "passthrough"

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
        return Tokenizer(PASSTHROUGH, None, vocab_size, eos_id=None, bos_id=None, fingerprint=PASSTHROUGH)
    return load_tokenizer(find_tokenizer(name))


def open_in_transformers(name: str) -> Any:
    """The tokenizer `name` as transformers loads it, including its chat template."""
    folder = find_tokenizer(name)
    prepare_hub()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = os.path.expanduser(folder)
    if os.path.isfile(os.path.join(path, "tokenizer_config.json")):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return PreTrainedTokenizerFast(tokenizer_file=os.path.join(path, "tokenizer.json"))


def cache_folder() -> str:
    """Folder of converted tokenizers; XDG_CACHE_HOME moves it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(root, "lmtrain", "tokenizers")


def _once(name: str, make: Callable[[str], None]) -> str:
    """Folder `name` in the cache, created atomically by `make(folder)` if it is missing."""
    folder = os.path.join(cache_folder(), name)
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        temporary = f"{folder}.tmp-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
        try:
            make(temporary)
            try:
                os.rename(temporary, folder)
            except OSError:  # another process was faster, with the same content
                if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_byte_tokenizer(folder: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = "<|endoftext|>"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([end])
    save_tokenizer(backend, folder, eos=end, bos=end)


def _byte_of(letter: str) -> int:
    """Byte of a letter of GPT-2's alphabet: printable bytes map to themselves, the others to code points from 256."""
    if ord(letter) < 256:
        return ord(letter)
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [byte for byte in range(256) if byte not in printable][ord(letter) - 256]


def _in_folder(name: str) -> str:
    """A folder with a tokenizer.json is used directly; one with an older format only is converted."""
    has = {file for file in ("tokenizer.json", *_PAIR, "tokenizer.model") if os.path.isfile(_join(name, file))}
    if "tokenizer.json" in has:
        return name
    if has.issuperset(_PAIR):
        return _from_pair(name)
    return _from_sentencepiece(_join(name, "tokenizer.model")) if has == {"tokenizer.model"} else name


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
    content = _read(name)

    def write(into: str) -> None:
        with open(os.path.join(into, "tokenizer.json"), "wb") as target:
            target.write(content)

    return _once(f"file-{hashlib.sha256(content).hexdigest()[:16]}", write)


def _from_pair(folder: str) -> str:
    """A byte-level BPE from `vocab.json` and `merges.txt`, as GPT-2 was published."""
    contents = [_read(_join(folder, file)) for file in _PAIR]
    config = _join(folder, "tokenizer_config.json")
    contents += [_read(config)] if os.path.isfile(config) else []
    contents += [text.encode() for _, text in sorted(read_templates(folder).items())]

    def convert(into: str) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

        vocab, merges = (os.path.expanduser(_join(folder, file)) for file in _PAIR)
        try:
            backend = Tokenizer(models.BPE.from_file(vocab, merges))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"tokenizer {folder!r}: invalid {' or '.join(_PAIR)}: {error}") from None
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        settings = read_settings(folder)
        named = [token_text(settings.get(kind)) for kind in ("eos_token", "bos_token")]
        eos, bos = (token or _GPT2_END for token in named)
        known = {token for token in (eos, bos) if backend.token_to_id(token) is not None}
        backend.add_special_tokens(sorted(known))
        save_tokenizer(
            backend,
            into,
            eos=eos if eos in known else None,
            bos=bos if bos in known else None,
            templates=read_templates(folder),
        )

    return _once(f"pair-{hashlib.sha256(b''.join(contents)).hexdigest()[:16]}", convert)


def _join(folder: str, file: str) -> str:
    return os.path.join(os.path.expanduser(folder), file)


def _read(path: str) -> bytes:
    from lmtrain.config.remote import told
    from lmtrain.runtime.storage import read_bytes

    with _of_tokenizer(path), told(path, "read"):
        return read_bytes(os.path.expanduser(path))


@contextlib.contextmanager
def _of_tokenizer(name: str) -> Iterator[None]:
    """Prefix errors within the context with the tokenizer."""
    try:
        yield
    except UserError as error:
        raise UserError(f"tokenizer {name!r}: {str(error).removeprefix(f'{name}: ')}") from None


def _from_url(url: str) -> str:
    from lmtrain.config.remote import open_fs, told

    contents = {}
    with _of_tokenizer(url), told(url, "read"):
        fs, path = open_fs(url)
        for file in TOKENIZER_FILES:
            with contextlib.suppress(FileNotFoundError):
                contents[file] = fs.cat_file(f"{path.rstrip('/')}/{file}")
    if "tokenizer.json" not in contents:
        raise UserError(f"tokenizer {url!r}: tokenizer.json not found")
    digest = hashlib.sha256(b"".join(name.encode() + contents[name] for name in sorted(contents))).hexdigest()[:16]

    def write(folder: str) -> None:
        for name, content in contents.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)

    return _once(f"url-{digest}", write)


def _from_hub(name: str) -> str:
    """Load with transformers, which adds what older repositories omit, such as GPT-2's end-of-text token."""
    repository, _, revision = name.partition("@")
    safe = re.sub(r"[^\w.-]", "--", name)
    name_here = f"hub-2-{safe}"
    folder = os.path.join(cache_folder(), name_here)
    if os.path.isfile(os.path.join(folder, "tokenizer.json")):
        return folder
    before = os.path.join(cache_folder(), f"hub-{safe}")  # without its chat template: fetched again, if possible
    has_before = os.path.isfile(os.path.join(before, "tokenizer.json"))

    def convert(folder: str) -> None:
        prepare_hub()
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(repository, revision=revision or None, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"tokenizer {name!r}: not found locally or on the Hugging Face Hub: {reason}\n"
                f"  {similar_folder(name)}offline, set data.tokenizer to a folder: a copy, or one made by "
                f"`lmtrain tokenizer train --output {name} FILES`; a gated repository requires HF_TOKEN"
            ) from None
        if not tokenizer.is_fast:
            raise UserError(f"tokenizer {name!r}: no fast tokenizer available; slow tokenizers are not supported")
        written = tokenizer.chat_template
        save_tokenizer(
            tokenizer.backend_tokenizer,
            folder,
            eos=tokenizer.eos_token,
            bos=tokenizer.bos_token,
            templates={"default": written} if isinstance(written, str) else written,
        )

    try:
        return _once(name_here, convert)
    except UserError:
        if not has_before:
            raise
        return before


def _from_sentencepiece(name: str) -> str:
    """Convert a sentencepiece model for the tokenizers library; the same object tokenizes and is exported."""
    content = _read(name)

    def convert(folder: str) -> None:
        from lmtrain.hf.sentencepiece import convert_sentencepiece

        backend, eos, bos = convert_sentencepiece(content, name)
        save_tokenizer(backend, folder, eos=eos, bos=bos, special_text=False)

    return _once(f"sentencepiece-2-{hashlib.sha256(content).hexdigest()[:16]}", convert)
