"""Tokenizer folders in the Hugging Face format: loading (without transformers), saving, and the bytes of each token."""

import functools
import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmtrain.hf.special_tokens import (
    ADDED_TOKENS_FILE,
    SETTINGS_FILE,
    SPECIAL_TOKENS_FILE,
    DeclaredTokens,
    add_declared,
    read_declared,
    read_settings,
    token_text,
)
from lmtrain.runtime.errors import UserError, counted, suggest_name
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import read_range, write_json
from lmtrain.runtime.text import refuse_pointer

if TYPE_CHECKING:
    import tokenizers


# The model of sentencepiece from which a tokenizer.json was made, which llama.cpp and others read.
MODEL_FILE = "tokenizer.model"
# The files that make up a tokenizer folder; an export copies those that exist.
TOKENIZER_FILES = (
    *("tokenizer.json", SETTINGS_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, "chat_template.jinja"),
    MODEL_FILE,
)
# Texts by whose ids tokenizers are compared.
COMPARED = ("Some text, 1234 more.\n\n\tx  = y;", " a", "\u00e9\u6771\u4eac \U0001f642 \ufb01", "a")
# Each id is a row of a model's embeddings; the library takes minutes to list the gaps between very large ones.
_MAX_VOCABULARY = 2**24
# Added tokens that are named in the log.
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer with its vocabulary size, special tokens and fingerprint; `library` is None for passthrough."""

    path: str
    library: "tokenizers.Tokenizer | None"
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    fingerprint: str

    @property
    def backend(self) -> "tokenizers.Tokenizer":
        """The library tokenizer that encodes and decodes text. Raises `UserError` for passthrough."""
        if self.library is None:
            raise UserError(f"tokenizer {self.path!r}: cannot encode or decode text, since its documents are token ids")
        return self.library

    def errors(self) -> AbstractContextManager[None]:
        """Context in which errors of the library, such as a character for which it has no token, are `UserError`s."""
        return library_errors(f"tokenizer {self.path!r}: it fails on this text")

    @functools.cached_property
    def parsing_backend(self) -> "tokenizers.Tokenizer":
        """The library tokenizer with text that spells a special token encoded as this token, in any folder."""
        if not self.backend.encode_special_tokens:
            return self.backend
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.encode_special_tokens = False
        return copy

    @functools.cached_property
    def added_ids(self) -> tuple[list[int], list[int]]:
        """Ids that transformers adds before and after a text, by the post-processor of tokenizer.json. Training does
        not: `enforce_bos` and `enforce_eos` decide."""
        with self.errors():
            text, complete = (self.backend.encode("x", add_special_tokens=added).ids for added in (False, True))
        starts = range(len(complete) - len(text) + 1)
        first = next((start for start in starts if complete[start : start + len(text)] == text), 0)
        before, after = complete[:first], complete[first + len(text) :]
        if not before and self.bos_id is not None and read_settings(self.path).get("add_bos_token"):
            before = [self.bos_id]  # of a folder without a tokenizer.json; transformers ignores it next to one
        return before, after

    @property
    def special_tokens(self) -> dict[int, str]:
        """Texts of the special tokens, by their ids."""
        added = self.backend.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    @property
    def identity(self) -> dict[str, Any]:
        """Values that are equal for two tokenizers that give the same ids."""
        return {"fingerprint": self.fingerprint, "vocab_size": self.vocab_size}


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Convert errors of the tokenizers library to a `UserError` that starts with `what`: it raises bare Exception, and
    panics, which Python does not count among exceptions."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error}") from None


def load_tokenizer(path: str) -> Tokenizer:
    """Load the folder `path`. Raises `UserError` if it does not exist or is not a tokenizer.

    A second call returns the same object, unless the files have changed.
    """
    folder = os.path.expanduser(path)
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(file):
        reason = "the folder holds no tokenizer.json" if os.path.isdir(folder) else "no such folder"
        hint = similar_folder(folder)
        raise UserError(
            f"tokenizer {path!r}: {reason}; {hint}make one with "
            f"`lmtrain tokenizer train --output {path} FILES`, or set data.tokenizer to an existing folder"
        )
    files = [os.path.abspath(os.path.join(folder, name)) for name in TOKENIZER_FILES]
    states = [os.stat(name) for name in files if os.path.exists(name)]
    return _load(path, (files[0], *((state.st_mtime_ns, state.st_size, state.st_ino) for state in states)))


@functools.lru_cache(16)
def _load(path: str, _identity: tuple[Any, ...]) -> Tokenizer:
    """Load the folder `path`; its absolute path and the versions of its files are the `_identity` for the cache."""
    import tokenizers

    folder = os.path.expanduser(path)
    file = os.path.join(folder, "tokenizer.json")
    refuse_pointer(read_range(file, 0, 1024), file)
    with library_errors(f"{file}: not a tokenizer"):
        backend = tokenizers.Tokenizer.from_file(file)
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= _MAX_VOCABULARY:
        raise UserError(f"{file}: has the token id {largest:,}; ids up to {_MAX_VOCABULARY - 1:,} are supported")
    if getattr(backend.model, "dropout", None):
        log.warning(
            f"{file}: dropout {backend.model.dropout:g} is turned off, with which equal texts have other tokens"
        )
        backend.model.dropout = None
    backend.no_truncation()  # a length limit in the folder would drop text
    backend.no_padding()
    declared, settings = read_declared(folder), read_settings(folder)
    added = add_declared(backend, declared)
    _log_added(folder, backend, added, declared)
    split_special = bool(settings.get("split_special_tokens", False))
    backend.encode_special_tokens = split_special
    eos, bos = declared.text("eos_token"), declared.text("bos_token")
    with open(file, encoding="utf-8") as opened:
        content = json.load(opened)
    defining = [content, eos, bos, *(["split_special_tokens"] if split_special else [])]
    defining += [sorted(token.__getstate__().items()) for token in added]
    digest = hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()
    return Tokenizer(
        path=path,
        library=backend,
        # ids may have gaps
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eos_id=None if eos is None else backend.token_to_id(eos),
        bos_id=None if bos is None else backend.token_to_id(bos),
        fingerprint=digest[:16],
    )


def _log_added(
    folder: str, backend: "tokenizers.Tokenizer", added: "list[tokenizers.AddedToken]", declared: DeclaredTokens
) -> None:
    """Log the tokens that tokenizer.json lacks, and those that have another id than the folder says."""
    if multiprocessing.parent_process() is not None:
        return  # logged by the process that has started this one
    if added:
        names = ", ".join(token.content for token in added[:_SHOWN]) + (", ..." if len(added) > _SHOWN else "")
        log.info(
            f"tokenizer {folder}: {counted(len(added), 'token')} added to those of tokenizer.json, as transformers "
            f"does: {names}"
        )
    for number, token in declared.numbered.items():
        if (ours := backend.token_to_id(token["content"])) != number:
            log.warning(
                f"tokenizer {folder}: {token['content']!r} has the id {ours}, as in transformers, but {number} in "
                f"{SETTINGS_FILE} or {ADDED_TOKENS_FILE}"
            )


def save_tokenizer(
    backend: "tokenizers.Tokenizer",
    folder: str,
    eos: str | None,
    bos: str | None = None,
    special_text: bool = True,
    templates: Mapping[str, str] | None = None,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `transformers.AutoTokenizer` loads, in versions 4 and 5.

    With `special_text` false, text that spells a special token is encoded as text, here and in transformers.
    `templates` are its chat templates by name, `others` further settings, such as `pad_token`.
    """
    os.makedirs(folder, exist_ok=True)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= others or {}
    config |= {} if special_text else {"split_special_tokens": True}
    config |= {name: token for name, token in (("eos_token", eos), ("bos_token", bos)) if token is not None}
    if templates:
        named = [{"name": name, "template": text} for name, text in sorted(templates.items())]
        config["chat_template"] = templates["default"] if templates.keys() == {"default"} else named
    write_json(os.path.join(folder, SETTINGS_FILE), config)
    temporary = os.path.join(folder, f"tokenizer.json.tmp-{os.getpid()}")
    with library_errors(f"{temporary}: cannot be written"):
        backend.save(temporary)
    os.replace(temporary, os.path.join(folder, "tokenizer.json"))  # last: its presence means complete


def with_model_file(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a tokenizer's folder that has a `tokenizer.model`, made complete for programs that read only that:
    its tokens that the model lacks are listed, and whether a text gets a BOS token. Without the model if it gives other
    ids."""
    backend = tokenizer.parsing_backend
    added = backend.get_added_tokens_decoder()
    try:
        pieces = _model_pieces(files[MODEL_FILE], backend, added)
    except ValueError as error:
        log.warning(f"tokenizer {tokenizer.path}: an export leaves out its {MODEL_FILE}, since {error}")
        return {name: content for name, content in files.items() if name != MODEL_FILE}
    settings = json.loads(files.get(SETTINGS_FILE, b"{}"))
    if "added_tokens_decoder" not in settings:  # next to it, transformers reads no other file with tokens
        declared = read_declared(tokenizer.path)
        extra = [token_text(token) for token in declared.extra]
        settings |= {**declared.texts, **({"extra_special_tokens": extra} if extra else {})}
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    settings["added_tokens_decoder"] = {
        str(number): {name: getattr(token, name) for name in flags} for number, token in sorted(added.items())
    }
    before, after = tokenizer.added_ids
    for name, ids in (("add_bos_token", before), ("add_eos_token", after)):
        settings.setdefault(name, bool(ids))
    further = {token.content: number for number, token in sorted(added.items()) if token.content not in pieces}
    return {**files, SETTINGS_FILE: to_json(settings), ADDED_TOKENS_FILE: to_json(further)}


def _model_pieces(content: bytes, backend: "tokenizers.Tokenizer", added: Mapping[int, Any]) -> set[str]:
    """The pieces of a sentencepiece model. Raises `ValueError` unless it gives the ids of the tokenizer, but for tokens
    that were added."""
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        raise ValueError("it is no model of sentencepiece") from None
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    for number, piece in enumerate(pieces):
        if piece != (ours := backend.id_to_token(number)) and number not in added:
            raise ValueError(f"its piece {number} is {piece!r}, and {ours!r} in tokenizer.json")
    for text in COMPARED:
        if (theirs := model.encode(text)) != (ids := backend.encode(text, add_special_tokens=False).ids):
            raise ValueError(f"{text!r} has the ids {theirs}, and {ids} by tokenizer.json")
    return set(pieces)


def to_json(settings: Mapping[str, Any]) -> bytes:
    """The content of a tokenizer_config.json."""
    return (json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def similar_folder(folder: str) -> str:
    """A question that names a tokenizer folder with a similar name next to `folder`; empty if there is none."""
    parent, name = os.path.split(folder.rstrip("/"))
    try:
        others = [other for other in os.listdir(parent or ".") if other != name]
    except OSError:
        return ""
    tokenizers = [other for other in others if os.path.isfile(os.path.join(parent, other, "tokenizer.json"))]
    similar = suggest_name(name, tokenizers)
    return f"did you mean {os.path.join(parent, similar)!r}? " if similar else ""


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Texts of one byte to find out whether a tokenizer adds a space; a small vocabulary may lack some of them.
_PROBES = "xeatoinsEA01"


@dataclass(frozen=True)
class TextSizes:
    """Bytes of each token's text, and those that it has as the first token of a text, after any of the tokens `after`:
    without the space that the tokenizer adds there. `first` is None if it adds none."""

    sizes: list[int]
    first: list[int] | None = None
    after: tuple[int, ...] = ()


def text_sizes(tokenizer: Tokenizer) -> TextSizes | None:
    """Sizes of a tokenizer's tokens: those of a document add up to its text, as the tokenizer normalizes it.

    A space at the start of a document is not counted if the tokenizer then adds none: its tokens are the same without.
    Returns None as `token_bytes` does.
    """
    sizes = token_bytes(tokenizer)
    if sizes is None:
        return None

    def size(text: str) -> int:
        try:
            with tokenizer.errors():
                ids = tokenizer.parsing_backend.encode(text, add_special_tokens=False).ids
        except UserError:  # a vocabulary without this letter
            return 0
        return sum(sizes[number] for number in ids)

    known = next((letter for letter in _PROBES if size(letter)), None)
    if known is None or size(known) != 2:
        return TextSizes(sizes)
    special = tokenizer.special_tokens
    after = {number for number in (tokenizer.eos_id, tokenizer.bos_id) if number is not None}
    if special and size(next(iter(special.values())) + known) == size(known):  # not only at the start of a text
        after |= special.keys()
    return TextSizes(sizes, [max(0, size - 1) for size in sizes], tuple(sorted(after)))


def token_bytes(tokenizer: Tokenizer) -> list[int] | None:
    """Length in bytes of each token's text; 0 for special tokens and unused ids.

    Two spellings of tokens are supported: byte-level BPE has one letter per byte, and sentencepiece has text with a
    sign for the space and names for bytes. Returns None for other kinds of tokenizers, whose tokens have no text of
    fixed length, and for passthrough.
    """
    if tokenizer.library is None:
        return None
    content = json.loads(tokenizer.library.to_str())
    decoder = json.dumps(content.get("decoder"), ensure_ascii=False)
    size: Callable[[str], int]
    if '"ByteLevel"' in decoder:
        size = len
    elif any(part in decoder for part in ('"ByteFallback"', '"Metaspace"', "▁")):
        size = _sentencepiece_bytes
    else:
        return None
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    model = content["model"]
    unknown = model.get("unk_id")  # whose text has no length
    if unknown is None and model.get("unk_token") is not None:
        unknown = tokenizer.library.token_to_id(model["unk_token"])
    lengths = [0] * tokenizer.vocab_size
    for text, number in tokenizer.library.get_vocab(with_added_tokens=True).items():
        if number in added:
            lengths[number] = 0 if added[number]["special"] else len(text.encode())
        elif number != unknown:
            lengths[number] = size(text)
    return lengths


def _sentencepiece_bytes(piece: str) -> int:
    return 1 if _BYTE.fullmatch(piece) else len(piece.replace("▁", " ").encode())


def encode_prompt(tokenizer: Tokenizer, prompt: str, setting: str, bos: bool) -> list[int]:
    """Token ids of the prompt, at least one: an empty prompt is the bos token, or else the eos token.

    With `bos` it starts with the bos token, as the documents of training do.

    Raises `UserError`, which names the `setting`, for an empty prompt if the tokenizer has neither.
    """
    with tokenizer.errors():
        ids: list[int] = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    if ids:
        return [tokenizer.bos_id, *ids] if bos and tokenizer.bos_id not in (None, ids[0]) else ids
    first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if first is None:
        raise UserError(f"{setting}: an empty prompt needs a tokenizer with a bos or eos token")
    return [first]
