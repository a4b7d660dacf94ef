"""Masking of secrets in everything that is saved, logged or shown: by the names of values, and in URLs.

A value is secret if its name says so (`api_key`, `db_password`, `hub_token`), at any depth. In URLs, also inside other
text, user info becomes `***@`, and the parameters of credentials together one `***` at the end of the query:

    https://me:word@host/a.jsonl?version=1&X-Amz-Date=20260101&X-Amz-Signature=0a1b  ->
    https://***@host/a.jsonl?version=1&***

So all signatures of a URL have the same masked form, in which files and identities of runs are compared.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import unquote

MASK = "***"

T = TypeVar("T")
_Path = tuple[str | int, ...]

# All names below are compared in snake case.
_SECRET = re.compile(r"api_?key|access_?key|private_?key|password|passwd|secret|credential")
_TOKEN = re.compile(r"(^|_)token$")
# Texts of a tokenizer or a chat template, such as `<s>`: names of transformers and of chat templates.
_SPECIAL_TOKEN = re.compile(
    r"(^|_)(bos|eos|unk|sep|pad|cls|mask|eot|eom|image|audio|video|special|begin|start|end|stop)_token$"
)
# Maps whose names are chosen by the user and name text sources, not settings.
_NAMES_OF_SOURCES = {("data", "configs"), ("data", "train_weights"), ("objective", "source_weights")}

# A URL may be a part of other text, so what is in doubt is user info. Its forms: user and password, which may contain
# any characters; keys of S3, whose password contains `/`; a user or a token alone. A number is a port, unless a host
# follows.
_PORT = r"""\d{1,5}(?:[/?#\s:,;)\]}>]|['"`](?:[\s,:;)\]}>]|$)|$)(?![^/\n]*@[\w.:\[\]-]+/)"""
_USER_INFO = re.compile(
    rf"""(?<=://)(?:
        [^/\s:@?\#'"<>`\[,]*:(?!\s|{_PORT})(?:(?!://)[^/\n])*@(?=[\w\[.*-])
        |[^/\s:@'"<>`\[]+:(?!\s|{_PORT})(?:(?!//)[^@\n])*@
        |[^/\s'"<>`]+@
    )""",
    re.VERBOSE,
)
# A quote ends a URL only where it may be the one that closes a text.
_IN_QUERY = r"""(?:[^\s'"<>`]|['"`](?![\s,:;.)\]}>]|$))"""
_QUERY = re.compile(rf"""\?(?P<parameters>{_IN_QUERY}*(?:[^\s'"<>`:,.;)\]}}]|(?<=\*)\*))""")
_FRAGMENT = re.compile(r"""(?P<before>://[^\s'"<>`?#]*)\#(?P<parameters>[^\s'"<>`]*[^\s'"<>`:,.;)\]}])""")
_SIGNATURE = re.compile(r"(^|_)(sig|sign|signature)$")
_CREDENTIALS = {"key", "auth", "authorization", "jwt", "google_access_id"}
# Parameters of a URL with a signature that a new signature changes: of Amazon, Google, CloudFront and Azure.
_PART_OF_SIGNATURE = re.compile(
    r"x_(amz|goog)_.*|expires|policy|key_pair_id|se|st|sp|sv|sr|spr|sip|ss|srt|skoid|sktid|skt|ske|sks|skv"
)

# Shorter secrets are not searched in other text, as they may be ordinary words.
_MIN_CHARACTERS = 6


def redact(value: T) -> T:
    """The same plain data with all secrets masked. A second call changes nothing."""
    masked: T = _Masking().of(value)
    return masked


def find_secrets(value: Any) -> list[str]:
    """The secrets in plain data, for `without`."""
    masking = _Masking()
    masking.of(value)
    return masking.secrets


def find_masked(value: Any) -> list[_Path]:
    """Paths of the values in plain data that have been masked."""
    masking = _Masking()
    masking.of(value)
    return list(dict.fromkeys(masking.masked))


def without(text: str, secrets: Iterable[str]) -> str:
    """The text with these secrets masked wherever they occur, for text in which they have no name and no URL."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _MIN_CHARACTERS:
            text = text.replace(secret, MASK)
    return text


class _Masking:
    """A pass over plain data that records the secrets it masks, and the paths of values that were masked before."""

    def __init__(self) -> None:
        self.secrets: list[str] = []
        self.masked: list[_Path] = []

    def of(self, value: Any, path: _Path = (), is_secret: bool = False) -> Any:
        """The value at `path`, masked."""
        if isinstance(value, dict):
            names = () if _parents(path) in _NAMES_OF_SOURCES else value
            return {
                name: self.of(item, (*path, name), is_secret or (name in names and _says_secret(name, item)))
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            items = [self.of(item, (*path, index), is_secret) for index, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if is_secret and value not in (None, "") and not isinstance(value, bool):
            return self._mask(str(value), path)
        return self._text(value, path) if isinstance(value, str) else value

    def _mask(self, secret: str, path: _Path, *parts: str) -> str:
        if secret == MASK:
            self.masked.append(path)
        else:
            self.secrets += [secret, *parts]
        return MASK

    def _text(self, text: str, path: _Path) -> str:
        if "://" in text:
            text = _USER_INFO.sub(lambda match: self._user_info(match[0][:-1], path), text)
            text = _FRAGMENT.sub(lambda match: match["before"] + self._query("#", match["parameters"], path), text)
        return _QUERY.sub(lambda match: self._query("?", match["parameters"], path), text)

    def _user_info(self, user_info: str, path: _Path) -> str:
        password = user_info.partition(":")[2]
        return self._mask(user_info, path, *({password, unquote(password)} - {""})) + "@"

    def _query(self, mark: str, query: str, path: _Path) -> str:
        parameters = [part.partition("=") for part in query.split("&")]
        names = [_snake_case(unquote(name)) for name, _, _ in parameters]
        is_signed = any(map(_SIGNATURE.search, names))
        kept, is_masked = [], False
        for name, (written, equals, value) in zip(names, parameters, strict=True):
            in_fragment = (_snake_case(unquote(part.partition("=")[0])) for part in value.split("#")[1:])
            if written == MASK or (value and any(map(_is_credential, (name, *in_fragment)))):
                self._mask(value or written, path)
                is_masked = True
            elif is_signed and _PART_OF_SIGNATURE.fullmatch(name):
                is_masked = True
            else:
                kept.append(written + equals + value)
        return mark + "&".join([*kept, MASK] if is_masked else kept)


def _says_secret(name: Any, value: Any) -> bool:
    """Whether a value is secret by its name. A number per token is none."""
    name = _snake_case(str(name))
    if _SECRET.search(name):
        return True
    return bool(_TOKEN.search(name)) and not _SPECIAL_TOKEN.search(name) and not isinstance(value, int | float)


def _is_credential(name: str) -> bool:
    """Whether a parameter of a URL is a credential."""
    return _says_secret(name, "") or name in _CREDENTIALS or _SIGNATURE.search(name) is not None


@functools.lru_cache(4096)
def _snake_case(name: str) -> str:
    """`X-Amz-Date` -> `x_amz_date`, `apiKey` -> `api_key`, `tracker.token` -> `tracker_token`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.]", "_", name).lower()


def _parents(path: _Path) -> tuple[str | int, ...]:
    """The last two names of a path, without indices of lists."""
    return tuple(part for part in path if not isinstance(part, int))[-2:]
