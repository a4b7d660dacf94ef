"""Keys of records and messages that change what a model should learn, besides those of the texts: one table.

Each is read, or refused with its value. A key that is not in the table but looks like a mark of what has a loss is
refused, too: a mark that is passed over trains on what its author has excluded. All others are named in a warning
(`DocumentReader`). `data.format.ignored_fields` names the keys that mean something else.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lmtrain.preprocess.records import BadRecordError
from lmtrain.runtime.text import parse_json

# The system message, next to the other messages: of ShareGPT, OpenHermes and others.
SYSTEM = ("system", "system_prompt", "system_message")
# What reaches the template besides the messages. OpenAI's older name of tools is functions.
TOOLS, FUNCTIONS, VARIABLES = "tools", "functions", "chat_template_kwargs"
# Whether a message is a target: of OpenAI, SlimOrca (weight), axolotl (train, training), ms-swift (loss).
MARKS = ("weight", "train", "training", "trainable", "loss", "loss_weight")
# Refused with what to do, unless they are empty.
_REFUSED = {
    "history": "write its turns as messages",
    "mask": "mark messages with weight: 0",
    "train_detail": "mark messages with weight: 0",
    "documents": "put them under chat_template_kwargs, for the template",
    "prefix": "a prefix of a reply that is not learned is not supported",
    "tool_call": "write a list under tool_calls",
    "template_kwargs": "write them under chat_template_kwargs",
    **dict.fromkeys(("enable_thinking", "custom_instructions"), "put it under chat_template_kwargs, for the template"),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), "only text is supported"),
}
# Texts that belong to a prompt or a reply, under usual names.
CONTEXT = (
    *("prompt", "question", "query", "instruction", "instructions", "input", "context", "passage", "document"),
    *("background", "knowledge", "persona", "developer", "system_instruction", "choices", "options", "suffix"),
    *("available_tools", "reasoning", "thinking", "thoughts", "complex_cot", "cot", "opa", "opb", "opc", "opd"),
    *("tool_calls", "function_call", "A", "B", "C", "D"),
)
# Words of other names under which such texts are: sql_context, old_contents, bot_persona; those of a reply.
_ASKED = {"system", "sys", "preamble", "persona", "instruction", "instructions", "context", "contexts", "ctxs"}
_ASKED |= {"passage", "passages", "document", "documents", "article", "story", "paragraph", "paragraphs", "premise"}
_ASKED |= {"evidence", "facts", "hint", "hints", "schema", "contents", "starter", "definition", "constraints", "inputs"}
_ASKED |= {"examples", "dialog", "dialogue", "turns", "background", "knowledge", "declarations", "attachments"}
_ASKED |= {"history", "previous", "past", "prior", "shots", "demonstrations", "exemplars", "utterances", "thread"}
_ASKED |= {"ctx", "schemas", "definitions", "personas", "personality", "preprompt", "sysprompt", "developer", "option"}
_ASKED |= {"endings", "tools", "functions", "apis", "attachment", "guidelines", "scenario", "table"}
_REPLIED = {"reasoning", "rationale", "rationales", "thinking", "thought", "thoughts", "cot", "think", "scratchpad"}
_MEDIA = {"image", "images", "audio", "audios", "video", "videos", "img", "wav", "pdf", "picture", "pictures", "media"}
# Words of names under which the last reply may stand, next to the messages before it.
_REPLY = {"answer", "answers", "assistant", "chosen", "completion", "content", "generated", "generation", "gold"}
_REPLY |= {"ideal", "label", "message", "output", "outputs", "prediction", "reply", "response", "responses", "result"}
_REPLY |= {"target"}
# Words of other names that look like marks: is_masked, lossWeight, train-on-turn. The value 1 of the first ones, and 0
# of the second, changes nothing, unless a word such as only says more.
_POSITIVE = {"weight", "weights", "train", "training", "trainable", "loss", "learn", "label", "labels", "kto"}
_POSITIVE |= {"supervised", "desirable", "accepted"}
_NEGATIVE = {"mask", "masks", "masked", "skip", "ignore", "exclude", "deleted", "skipped", "ignored", "excluded"}
_NEGATIVE |= {"omit", "drop"}
# Words that say what is masked, as in loss_mask; the other negative ones always mean that there is no loss.
_OF_LOSS = {"mask", "masks"}
_OF_MESSAGES = {"target", "include", "included"}
_RESTRICTING = {"only", "on", "no", "not", "without", "first", "last", "turns", "rounds", "indices", "dont"}
_RESTRICTING |= {"disable", "disabled"}
_PLACES = {"url", "path", "link"}
_INVISIBLE = " \t\r\n\f\v\u00a0\u200b\u200c\u200d\u2060\ufeff"
_TRUTH = {"yes": 1, "true": 1, "1": 1, "no": 0, "false": 0, "0": 0}
# Values of keys such as reasoning and reasoning_effort that say how to answer.
_SWITCHES = ("on", "off", "none", "minimal", "low", "medium", "high")
# Words of names that mean something else: train_id, language_label; context_length, of texts only.
_OTHERS = {"id", "ids", "in", "used", "num", "formatting", "index", "split", "set"}
_OTHERS |= {"size", "name", "source", "language", "lang", "time", "date", "step"}
_DETAILS = {"type", "category", "topic", "level", "score", "count", "num", "length", "hash", "author", "version"}
_DETAILS |= {"fingerprint", "model", "title", "difficulty", "quality", "rating", "tag", "tags", "domain", "status"}
_DETAILS |= {"tokens", "token", "seed", "format", "operating", *_OTHERS}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_IGNORE = "; if it means something else, add it to data.format.ignored_fields"


def without(record: Mapping[str, Any], ignored: Collection[str]) -> Mapping[str, Any]:
    """A record or message without the `ignored` keys."""
    return {name: value for name, value in record.items() if name not in ignored} if ignored else record


def may_matter(name: str) -> bool:
    """Whether a key is in the table, or looks as if it belonged there."""
    words = _words(name)
    is_known = _joined(name) in _TABLE or _joined(name) in _REFUSED_NAMES
    return is_known or bool(set(words) & (_ASKED | _REPLIED | _MEDIA)) or _is_mark(words)


def is_unread(name: str, value: Any, is_read: bool) -> bool:
    """Whether nothing is done with a key's value. It is read by no one; or it looks like a part of a prompt without a
    text, or like a mark without a number. `value` is None if it is not known."""
    if not is_read or value is None:
        return not is_read
    if _joined(name) in _TABLE:
        return isinstance(value, bool)
    if _joined(name) in _REFUSED_NAMES or not may_matter(name) or is_context(name, value):
        return False
    return not (_is_mark(_words(name)) and all(isinstance(one, bool | int | float) for one in _numbers(value)))


def is_context(name: str, value: Any) -> bool:
    """Whether a key holds a text that belongs to a prompt or a reply: one of the table in any spelling, or a text
    under a name with such a word."""
    words, of_texts = _words(name), _ASKED | _REPLIED
    if _joined(name) in _TABLE:
        return True
    # the last word decides: source_documents are documents, and document_source is none
    is_text = words[-1:] and words[-1] in of_texts and "operating" not in words
    return bool(is_text or (set(words) & of_texts and not set(words) & (_DETAILS | _PLACES))) and _has_text(value)


def is_reply(name: str, value: Any) -> bool:
    """Whether a key may hold the reply to the last message."""
    return bool(set(_words(name)) & _REPLY) and not set(_words(name)) & (_DETAILS | _PLACES) and _has_text(value)


def refuse_others(record: Mapping[str, Any], read: Collection[str] = (), place: str = "") -> None:
    """Raise `BadRecordError` for keys other than those of `read` that change what should be learned.

    Texts are no marks, and the value 1 of a mark changes nothing.
    """
    for name, value in record.items():
        switches = name == "thinking" and isinstance(value, bool)
        if (name in read and not switches) or value is None or value in ("", [], {}, ()):
            continue
        words = set(_words(name))
        known = "enable_thinking" if switches else _REFUSED_NAMES.get(_joined(name))
        if known is None and words & _MEDIA and not words & _DETAILS and _has_text(value):
            known = "images"
        if known is not None and (value is not False or known == "enable_thinking"):
            raise BadRecordError(f"{place}{name!r} is not read: {_REFUSED[known]}{_IGNORE}")
        values = _numbers(value)
        if _is_mark(_words(name), place) and all(isinstance(one, bool | int | float) for one in values):
            neutral = 0 if _excludes(_words(name)) else 1
            if all(one == neutral for one in values) and not words & _RESTRICTING:
                continue
            raise BadRecordError(
                f"{place}{name!r} looks like a mark of what has a loss, and is not read: only messages of "
                f"conversations can be marked, with weight: 0 or 1{_IGNORE}"
            )


def refuse_context(
    record: Mapping[str, Any], read: Collection[str], asked: Sequence[str], replies: Sequence[str]
) -> None:
    """Raise `BadRecordError` if a record has more than the texts that are `asked` and the `replies`, which are under
    the keys of `read`: other parts of a prompt or reply (`is_context`) that are not in these."""
    lost = [
        name
        for name, value in record.items()
        if name not in read and value not in (None, "", [], {}) and is_context(name, value)
        if not is_inside(value, replies if set(_words(name)) & _REPLIED else asked)
    ]
    switches = [name for name in lost if str(record[name]).lower() in _SWITCHES]
    if switches:
        raise BadRecordError(
            f"{switches[0]!r} is not read: put it under chat_template_kwargs, for the template, or add it to "
            "data.format.ignored_fields"
        )
    if lost:
        what, them = ("are not read, and are", "them") if len(lost) > 1 else ("is not read, and is", "it")
        raise BadRecordError(
            f"{', '.join(map(repr, lost))} {what} not in the texts that are: write {them} into these, or add {them} to "
            "data.format.ignored_fields"
        )


def refuse_others_of(record: Mapping[str, Any], names: Sequence[str], read: Collection[str], texts: Any) -> None:
    """Raise `BadRecordError` if one of the keys `names` holds other text than the one that is read, `texts`."""
    for name in names:
        value = record.get(name)
        if name not in read and value not in (None, "", [], {}) and not is_inside(value, texts):
            raise BadRecordError(
                f"{name!r} is not read, and is not in the texts that are; keep one of them, or add it to "
                "data.format.ignored_fields"
            )


def is_blank(text: str) -> bool:
    """Whether a text has nothing that can be seen."""
    return not text.strip(_INVISIBLE)


def is_inside(value: Any, texts: Sequence[str]) -> bool:
    """Whether all texts in a value are parts of one of the `texts`."""
    if isinstance(value, str):
        words = " ".join(value.split())
        return any(_has(text, value.strip()) or _has(" ".join(text.split()), words) for text in texts)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return any(re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", text) for text in texts)
    if isinstance(value, Mapping):
        return all(is_inside(part, texts) for name, part in value.items() if name not in ("role", "from", "type"))
    if isinstance(value, list | tuple):
        return all(is_inside(part, texts) for part in value)
    return value is None or isinstance(value, bool) or is_inside(str(value), texts)  # such as a date of Arrow


def _has(text: str, part: str) -> bool:
    """Whether a text has a part, but not within a number: 10 is no part of 100."""
    at = text.find(part)
    while at >= 0:
        end = at + len(part)
        cuts = part[:1].isdigit() and text[max(0, at - 1) : at].isdigit()
        if not (cuts or (part[-1:].isdigit() and text[end : end + 1].isdigit())):
            return True
        at = text.find(part, at + 1)
    return False


def mark_of(message: Mapping[str, Any], place: str) -> bool | None:
    """Whether a message is marked as a target; None without a mark. Raises `BadRecordError` for other values."""
    found: dict[str, bool] = {}
    for name in MARKS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRecordError(
                f"{place}{name!r} is {value!r}; only 0 and 1, or false and true, are supported{_IGNORE}"
            )
        found[name] = bool(value)
    if len(set(found.values())) > 1:
        raise BadRecordError(f"{place}{' and '.join(map(repr, found))} contradict each other")
    return next(iter(found.values()), None)


def system_text(record: Mapping[str, Any]) -> str:
    """The text of a record's system message next to its messages; empty without one."""
    texts = {name: record[name] for name in SYSTEM if record.get(name) not in (None, "", [])}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise BadRecordError(f"{name!r} is {type(value).__name__}, not text")
    if len(set(texts.values())) > 1:
        raise BadRecordError(f"{' and '.join(map(repr, texts))} are different texts; keep one of them")
    return next(iter(texts.values()), "")


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a record, as templates expect them; None without any."""
    listed = {name: _tools(record.get(name), name) for name in (TOOLS, FUNCTIONS)}
    if listed[TOOLS] and listed[FUNCTIONS]:
        raise BadRecordError(f"has {TOOLS!r} and {FUNCTIONS!r}; keep one of them")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed[FUNCTIONS]]
    return listed[TOOLS] or wrapped or None


def parsed_json(value: Any) -> Any:
    """What a text is in JSON, if it is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def leaves_of(value: Any) -> list[str]:
    """The texts and numbers in the arguments of a call."""
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves_of(part)]
    return [] if value is None or isinstance(value, bool) else [str(value)]


def function_of(call: Any) -> Mapping[str, Any]:
    """The function of a tool or of its call, with its name; empty for anything else."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def strings_of(value: Any) -> tuple[str, ...]:
    """Every text in the contents of messages."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        value = [part for name, part in value.items() if name != "role"]
    if isinstance(value, Sequence):
        return tuple(text for part in value for text in strings_of(part))
    return ()


def are_lists(*texts: str) -> bool:
    """Whether all texts are lists of texts in JSON."""
    return all(text.lstrip().startswith('["') and isinstance(parsed_json(text), list) for text in texts)


def names_all(text: str, calls: Collection[Any]) -> bool:
    """Whether a text has all of these tools, or calls of them, as JSON, Python or in a tag."""
    names = [re.escape(str(function_of(call).get("name", ""))) for call in calls]
    ways = r"""["'=]{0}["'>]|(?<!\w){0}\(\s*[^)\s]|Action:\s*{0}(?!\w)"""
    return any(names) and all(re.search(ways.replace("{0}", name), text) for name in names if name)


def calls_of(value: Any, place: str) -> list[Any]:
    """Tool calls with their arguments as maps, as templates expect them: OpenAI writes them as JSON text."""
    listed = parsed(value, f"{place}tool_calls") or []
    if not isinstance(listed, list):
        raise BadRecordError(f"{place}'tool_calls' is {type(listed).__name__}, not a list of calls")
    return [_call(parsed(call, f"{place}tool_calls"), place) for call in listed]


def _call(call: Any, place: str) -> Any:
    if not isinstance(call, dict):
        raise BadRecordError(f"{place}'tool_calls' has {type(call).__name__}, not maps with name and arguments")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], place)}
    if "function" in call or not isinstance(call.get("name"), str) or not call["name"]:
        raise BadRecordError(f"{place}'tool_calls' has a call without a function of a name and a map of arguments")
    if other := [
        name for name in ("args", "parameters", "input", "custom") if name in call and "arguments" not in call
    ]:
        raise BadRecordError(f"{place}'tool_calls' has a call with {other[0]!r}; write it as 'arguments', a map")
    arguments = parsed(call.get("arguments"), f"{place}arguments")
    if isinstance(arguments, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in arguments):
        arguments = dict(arguments)  # a map of Arrow
    if not isinstance(arguments, dict | None):
        raise BadRecordError(f"{place}'arguments' is {type(arguments).__name__}, not a map")
    return {**call, "arguments": arguments or {}}


def variables_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record's own variables for the template."""
    variables = parsed(record.get(VARIABLES), VARIABLES) or {}
    if not isinstance(variables, Mapping):
        raise BadRecordError(f"{VARIABLES!r} is {type(variables).__name__}, not a map")
    return variables


def parsed(value: Any, key: str) -> Any:
    """A list or map; some datasets store them as JSON text. An empty text is None."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except ValueError as error:
        raise BadRecordError(f"{key!r} is text, but not JSON: {error}") from None


def _tools(value: Any, key: str) -> list[Mapping[str, Any]]:
    listed = parsed(value, key) or []
    if not isinstance(listed, list):
        raise BadRecordError(f"{key!r} is {type(listed).__name__}, not a list of tools")
    tools = [parsed(tool, key) for tool in listed]
    if others := [tool for tool in tools if not isinstance(tool, Mapping)]:
        raise BadRecordError(f"{key!r} has {type(others[0]).__name__}, not maps that describe tools")
    return tools


def _is_mark(words: Sequence[str], place: str = "") -> bool:
    marks = _POSITIVE | _NEGATIVE | (_OF_MESSAGES if place else set())
    return bool(set(words) & marks) and not set(words) & _OTHERS


def _excludes(words: Sequence[str]) -> bool:
    """Whether a mark with these words, of the value 1, means that there is no loss: mask_loss, not loss_mask."""
    if set(words) & (_NEGATIVE - _OF_LOSS):
        return True
    return bool(set(words) & _OF_LOSS) and (not set(words) & _POSITIVE or words[0] in _OF_LOSS)


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_text, value.values()))
    return any(map(_has_text, value)) if isinstance(value, list | tuple) else isinstance(value, str) and value != ""


def _numbers(value: Any) -> list[Any]:
    """The values of a mark, with those that are texts as numbers if they are some."""
    listed = value if isinstance(value, list) else [value]
    return [_TRUTH.get(one.lower(), one) if isinstance(one, str) else one for one in listed]


@functools.lru_cache(maxsize=4096)  # the same names in each record
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(name))


@functools.lru_cache(maxsize=4096)
def _joined(name: str) -> str:
    """A name without its case and separators: systemPrompt, "System Prompt" and system_prompt are one."""
    return re.sub(r"[\W_]+", "", name).lower()


_TABLE = {_joined(name) for name in (*SYSTEM, TOOLS, FUNCTIONS, VARIABLES, *CONTEXT)}
_REFUSED_NAMES = {_joined(name): name for name in _REFUSED}
