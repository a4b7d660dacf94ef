"""Tokens that a tokenizer folder declares in addition to its added tokens, read as transformers 5 reads them.

    tokenizer.json              the token of its padding
    tokenizer_config.json       named tokens (`eos_token`), `added_tokens_decoder`, `extra_special_tokens`
    special_tokens_map.json     named tokens and `extra_special_tokens`, which replace those of tokenizer_config.json
    added_tokens.json           ids of added tokens
    the tokenizer's class       named tokens of which the files say nothing, such as `</s>` of LlamaTokenizer

special_tokens_map.json and added_tokens.json count only if tokenizer_config.json has no `added_tokens_decoder`.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmtrain.hf.hub import prepare_hub
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import read_json

if TYPE_CHECKING:
    import tokenizers

SETTINGS_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

# Named tokens, in the order in which transformers adds those that the vocabulary lacks.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_DECODER, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
# Classes without tokens of their own. Older versions wrote names with "Fast".
PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")


@dataclass(frozen=True, kw_only=True)
class DeclaredTokens:
    """Named tokens by name, each a text or a map with flags; numbered tokens by the id that the files give them; and
    further special tokens. `by_class` are the named tokens that only the tokenizer's class has."""

    named: Mapping[str, Any]
    numbered: Mapping[int, Mapping[str, Any]]
    extra: tuple[Any, ...]
    by_class: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """The text of the token `name`, such as `eos_token`; None if there is none."""
        return token_text(self.named.get(name)) or None

    @property
    def texts(self) -> dict[str, str]:
        """Texts of the named tokens of transformers' API, which chat templates may use."""
        return {name: text for name in NAMES if (text := self.text(name)) is not None}


def token_text(token: Any) -> str | None:
    """Text of a special token, which is written as text or as a map with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def read_settings(folder: str) -> dict[str, Any]:
    """Content of the folder's tokenizer_config.json; empty if there is none."""
    return _read_map(folder, SETTINGS_FILE)


def read_declared(folder: str) -> DeclaredTokens:
    """The tokens that the files of a tokenizer folder and its class declare. Raises `UserError` for invalid files."""
    folder = os.path.expanduser(folder)
    names = (SETTINGS_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, "tokenizer.json", "config.json")
    paths = (os.path.join(os.path.abspath(folder), name) for name in names)
    states = ((path, os.stat(path)) for path in paths if os.path.exists(path))
    return _read_declared(folder, tuple((path, state.st_mtime_ns, state.st_size) for path, state in states))


@functools.lru_cache(16)
def _read_declared(folder: str, _versions: tuple[Any, ...]) -> DeclaredTokens:
    settings = read_settings(folder)
    given, place = dict(settings), os.path.join(folder, SETTINGS_FILE)
    if not given.get(_EXTRA) and _OLD_EXTRA in given:
        given[_EXTRA] = given[_OLD_EXTRA]
    extra = given.get(_EXTRA) or []
    named = {name: value for name, value in given.items() if name in NAMES or _is_own_name(name, value)}
    if isinstance(extra, dict):
        named, extra = named | extra, []
    if _DECODER in settings:
        numbered = _numbered(place, settings[_DECODER])
    else:
        mapped = _read_map(folder, SPECIAL_TOKENS_FILE)
        place = os.path.join(folder, SPECIAL_TOKENS_FILE) if mapped else place
        more = mapped.get(_EXTRA) or ([] if extra else mapped.get(_OLD_EXTRA)) or []
        if isinstance(more, dict):
            named, more = named | more, []
        named |= {name: value for name, value in mapped.items() if name not in (_EXTRA, _OLD_EXTRA)}
        extra = [*_listed(place, extra), *(token for token in _listed(place, more) if token not in extra)]
        numbered = {}
    extra = _listed(place, extra)
    for name, token in (*named.items(), *((_EXTRA, token) for token in extra)):
        _check_token(place, name, token)
    if _DECODER not in settings:
        special = {token_text(token) for token in (*named.values(), *extra)}
        place = os.path.join(folder, ADDED_TOKENS_FILE)
        for text, index in _read_map(folder, ADDED_TOKENS_FILE).items():
            is_special = text in special
            numbered[_number(place, index)] = {"content": text, "special": is_special, "normalized": not is_special}
    by_class = _tokens_of_class(folder, settings, named)
    if "pad_token" not in named and "pad_token" not in by_class and (padding := _padding(folder)) is not None:
        named["pad_token"] = padding
    named = {name: value for name, value in named.items() if value is not None}
    return DeclaredTokens(named=named | by_class, numbered=numbered, extra=tuple(extra), by_class=by_class)


def add_declared(backend: "tokenizers.Tokenizer", declared: DeclaredTokens) -> "list[tokenizers.AddedToken]":
    """Add the declared tokens that the tokenizer does not have as added tokens, with these flags; returns them.

    The order is that of transformers, so that new tokens get the same ids: numbered, named, further ones.
    """
    from tokenizers import AddedToken

    own = backend.get_added_tokens_decoder().values()
    same = {repr(token) for token in own}
    numbered = [AddedToken(**_flags(token)) for _, token in sorted(declared.numbered.items())]
    adding = [token for token in numbered if repr(token) not in same]
    known = {token.content for token in (*own, *adding)}
    special = {token_text(token) for token in declared.named.values()}
    ordered = sorted(declared.named.items(), key=lambda item: NAMES.index(item[0]) if item[0] in NAMES else len(NAMES))
    for token in [*(token for _, token in ordered), *declared.extra]:
        text = token_text(token)
        if text and text not in known:
            adding.append(AddedToken(**{"content": text, "special": True, **_flags(token)}))
            known.add(text)
    for token in adding:
        token.special = token.special or token.content in special
    backend.add_tokens(adding)
    return adding


def _flags(token: Any) -> dict[str, Any]:
    return {name: value for name, value in token.items() if name != "__type"} if isinstance(token, Mapping) else {}


def _tokens_of_class(folder: str, settings: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, str]:
    """Named tokens that the files do not mention, and the class in transformers has."""
    name = settings.get("tokenizer_class") or _read_map(folder, "config.json").get("tokenizer_class")
    is_plain = isinstance(name, str) and name.removesuffix("Fast") in PLAIN_CLASSES
    unknown = name is None and "model_type" not in _read_map(folder, "config.json")
    has_file = os.path.isfile(os.path.join(folder, "tokenizer.json"))
    if is_plain or unknown or not has_file or named.keys() >= {"eos_token", "bos_token", "unk_token"}:
        return {}
    prepare_hub()
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).special_tokens_map
    except Exception:  # a class with other files, or code of its own: it says nothing about these tokens
        return {}
    return {name: str(theirs[name]) for name in NAMES if name in theirs and name not in named}


def _padding(folder: str) -> str | None:
    """The token of the padding that tokenizer.json switches on; transformers keeps it as `pad_token`."""
    try:
        padding = (_read_map(folder, "tokenizer.json").get("padding") or {}).get("pad_token")
    except (UserError, AttributeError):  # reported when the tokenizer is loaded
        return None
    return padding if isinstance(padding, str) else None


def _read_map(folder: str, name: str) -> dict[str, Any]:
    """Content of a JSON file of the folder; empty if there is none."""
    file = os.path.join(os.path.expanduser(folder), name)
    if not os.path.isfile(file):
        return {}
    try:
        values = read_json(file)
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: not a JSON object")
    return values


def _is_own_name(name: str, value: Any) -> bool:
    """Whether a setting names a token of this model only, such as `image_token`."""
    return name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "__type" in value))


def _numbered(place: str, decoder: Any) -> dict[int, dict[str, Any]]:
    _expect(isinstance(decoder, dict), place, _DECODER, "a map of ids to tokens", decoder)
    for number, token in decoder.items():
        _expect(isinstance(token, dict), place, f"{_DECODER} {number}", "a map with content", token)
        _check_token(place, f"{_DECODER} {number}", token)
    return {_number(place, number): token for number, token in decoder.items()}


def _number(place: str, number: Any) -> int:
    _expect(str(number).isdecimal(), place, "added tokens", "a token id", number)
    return int(number)


def _listed(place: str, tokens: Any) -> list[Any]:
    _expect(isinstance(tokens, list), place, _EXTRA, "a list of tokens", tokens)
    return list(tokens)


def _check_token(place: str, name: str, token: Any) -> None:
    """Raise `UserError` unless `token` is a text, or a map with `content` and flags."""
    flags = token.items() if isinstance(token, dict) else ()
    known = ("lstrip", "rstrip", "single_word", "normalized", "special")
    are_flags = all(key in ("content", "__type") or (key in known and isinstance(value, bool)) for key, value in flags)
    holds = token is None or (isinstance(token_text(token), str) and are_flags)
    _expect(holds, place, name, "a token as text, or a map with content and flags", token)


def _expect(holds: bool, place: str, name: str, expected: str, value: Any) -> None:
    if not holds:
        raise UserError(f"{place}: {name}: expected {expected}, not {value!r:.100}")
