"""Tokenizer folders in the Hugging Face format: loading (without transformers) and saving."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmtrain.config.encodings import refuse_pointer
from lmtrain.config.errors import UserError
from lmtrain.config.suggest import suggest_name
from lmtrain.runtime.storage import read_bytes, read_json, write_json

if TYPE_CHECKING:
    import tokenizers

SETTINGS_FILE = "tokenizer_config.json"
# The files that make up a tokenizer folder; an export copies those that exist.
TOKENIZER_FILES = ("tokenizer.json", SETTINGS_FILE, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
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

    @functools.cached_property
    def parsing_backend(self) -> "tokenizers.Tokenizer":
        """The library tokenizer with text that spells a special token encoded as this token, in any folder."""
        if not self.backend.encode_special_tokens:
            return self.backend
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        copy.encode_special_tokens = False
        return copy

    @property
    def identity(self) -> dict[str, Any]:
        """Values that are equal for two tokenizers that give the same ids."""
        return {"fingerprint": self.fingerprint, "vocab_size": self.vocab_size}


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
    try:
        backend = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library raises bare Exception
        refuse_pointer(read_bytes(file), file)
        raise UserError(f"{file}: not a tokenizer: {error}") from None
    backend.no_truncation()  # a length limit in the folder would drop text
    backend.no_padding()
    config = read_settings(folder)
    split_special = bool(config.get("split_special_tokens", False))
    backend.encode_special_tokens = split_special
    eos, bos = token_text(config.get("eos_token")), token_text(config.get("bos_token"))
    with open(file, encoding="utf-8") as opened:
        content = json.load(opened)
    defining = [content, eos, bos, *(["split_special_tokens"] if split_special else [])]
    digest = hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()
    return Tokenizer(
        path=path,
        library=backend,
        # ids may have gaps
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eos_id=_token_id(backend, eos, folder),
        bos_id=_token_id(backend, bos, folder),
        fingerprint=digest[:16],
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
    backend.save(temporary)
    os.replace(temporary, os.path.join(folder, "tokenizer.json"))  # last: its presence means complete


def read_settings(folder: str) -> dict[str, Any]:
    """Content of the folder's tokenizer_config.json; empty if there is none."""
    file = os.path.join(os.path.expanduser(folder), SETTINGS_FILE)
    if not os.path.isfile(file):
        return {}
    try:
        config = read_json(file)
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def to_json(settings: Mapping[str, Any]) -> bytes:
    """The content of a tokenizer_config.json."""
    return (json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def token_text(token: Any) -> str | None:
    """Text of a special token, which is written as text or as a map with `content`."""
    return token.get("content") if isinstance(token, dict) else token


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


def _token_id(backend: "tokenizers.Tokenizer", token: str | None, folder: str) -> int | None:
    if token is None:
        return None
    number = backend.token_to_id(token)
    if number is None:
        raise UserError(
            f"{folder}: tokenizer_config.json names the token {token!r}, which tokenizer.json does not have"
        )
    return int(number)
