"""Chat completions in the form of OpenAI's API: what a request asks for, and the objects of a response.

    {"messages": [{"role": "user", "content": "..."}], "temperature": 0.7, "max_tokens": 100, "stream": true}

Settings that would change the text and are not supported are errors; those that describe the request are ignored.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.generation.decode import SamplingSettings
from lmtrain.runtime.errors import UserError

# Values of settings that have no effect; other values are errors.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "parallel_tool_calls": (True, False, None),
    "reasoning_effort": (None, "none"),
}
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"}
_MOST_CHOICES = 16
_ROLES = ("system", "user", "assistant", "tool")


class RequestError(UserError):
    """A request that cannot be answered: `param` is the setting, `code` OpenAI's name of the error, if any."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The response."""
        kind = "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for: `choices` replies; `seed` None is a random one."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any]
    settings: SamplingSettings
    seed: int | None
    stops: Sequence[str]
    choices: int
    streams: bool
    with_usage: bool


def read_request(body: bytes, default: SamplingSettings) -> Asked:
    """A request with the settings that it lacks from `default`. Raises `RequestError`."""
    try:
        values = json.loads(body)
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has one half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON, or too deeply nested") from None
    if not isinstance(values, dict):
        raise RequestError("the body is not a JSON object")
    given = dict(values)
    messages = [_message(message, number) for number, message in enumerate(_list(given, "messages"))]
    if not messages:
        raise RequestError("messages: expected at least one message", "messages")
    stop = given.pop("stop", None)
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise RequestError("stop: expected a text or a list of texts", "stop")
    most = [_number(given, name, None, 1, 2**31, whole=True) for name in ("max_completion_tokens", "max_tokens")]
    new = next((value for value in most if value is not None), default.max_new_tokens)
    temperature = _number(given, "temperature", default.temperature, 0, 100)
    top_k = _number(given, "top_k", default.top_k, 0, 2**31 - 1, whole=True)
    top_p = _number(given, "top_p", default.top_p, 0, 1)
    options = _kind(given, "stream_options", dict, {})
    tools = _list(given, "tools")
    asked = Asked(
        messages=messages,
        tools=[] if given.get("tool_choice") == "none" else tools,
        settings=SamplingSettings(int(new), float(temperature), int(top_k), float(top_p)),
        seed=_number(given, "seed", None, -(2**63), 2**64, whole=True),
        stops=stops,
        choices=int(_number(given, "n", 1, 1, _MOST_CHOICES, whole=True)),
        streams=_kind(given, "stream", bool, False),
        with_usage=_kind(options, "include_usage", bool, False),
    )
    for name, value in given.items():
        if name in _WITHOUT_EFFECT and value not in _WITHOUT_EFFECT[name]:
            raise RequestError(f"{name}: {json.dumps(value)[:100]} is not supported; remove it", name)
        if name not in _WITHOUT_EFFECT and name not in _IGNORED:
            raise RequestError(f"{name}: unknown setting; remove it", name)
    return asked


def _list(values: dict[str, Any], name: str) -> list[Any]:
    found: list[Any] = _kind(values, name, list, [])
    return found


def _kind(values: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = values.pop(name, None)
    if value is not None and not isinstance(value, kind):
        kinds = {list: "a list", dict: "an object", bool: "true or false"}
        raise RequestError(f"{name}: expected {kinds[kind]}, got {json.dumps(value)[:100]}", name)
    return default if value is None else value


def _number(values: dict[str, Any], name: str, default: Any, least: float, most: float, whole: bool = False) -> Any:
    value = values.pop(name, None)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and (not whole or value == int(value))
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name}: expected {kind} from {least:g} to {most:g}, got {json.dumps(value)[:100]}", name)
    return int(value) if whole else value


def _message(message: Any, number: int) -> dict[str, Any]:
    """A message with its content as one text."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: expected an object with role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            raise RequestError(f"{where}: only parts of type text are supported", "messages")
        content = "".join(texts)
    if not isinstance(content, str | None) or (content is None and not message.get("tool_calls")):
        raise RequestError(f"{where}: expected a text as content", "messages")
    role = {"developer": "system"}.get(message["role"], message["role"])
    if role not in _ROLES:
        raise RequestError(f"{where}: unknown role {role!r}; known: {', '.join(_ROLES)}", "messages")
    return {**message, "role": role, "content": content}


class Completion:
    """The objects of the response to one request."""

    def __init__(self, model: str):
        self._common = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def complete(self, texts: Sequence[str], reasons: Sequence[str], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The complete response."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": dict(usage)}

    def part(self, index: int, delta: Mapping[str, str], reason: str | None = None) -> dict[str, Any]:
        """A piece of one reply; the last one has the reason why it ends."""
        choice = {"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": reason}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last part of a stream that was asked for it."""
        return {**self._common, "object": "chat.completion.chunk", "choices": [], "usage": dict(usage)}


def usage_of(prompt: int, cached: int, new: int) -> dict[str, Any]:
    """Numbers of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
