"""Chat templates of tokenizers, rendered by transformers' function, with limits of time and memory."""

import functools
import glob
import hashlib
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lmtrain.hf.config import RENDERER_NAMES
from lmtrain.hf.hub import prepare_hub
from lmtrain.hf.special_tokens import SETTINGS_FILE, read_declared, read_settings
from lmtrain.hf.tokenizer import TOKENIZER_FILES, Tokenizer, to_json
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import read_bytes
from lmtrain.runtime.text import not_utf8

TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
DEFAULT_TEMPLATE = "default"
_UNNAMED = "the chat template, line "
# Jinja's name of the file of a template that it is given as text.
_TEMPLATE_FRAME = "<template>"

# Texts in a template that are certainly meant as one token.
_SPELLED = re.compile(r"<\|[^|<>\s{}'\"]+\|>")


# What a message says by which a template is tried.
PROBE = "lmtrain"


class TemplateError(Exception):
    """A template that fails on a conversation, with its line and the reason that it or the sandbox gives."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the parts that `{% generation %}` marks, as [start, end) in characters."""

    text: str
    generated: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may use as variables. `place` precedes a line number in messages."""

    text: str
    tokens: tuple[tuple[str, str], ...] = ()
    place: str = field(default=_UNNAMED, compare=False)

    @property
    def digest(self) -> str:
        """Hash of the template and its tokens: equal ones give equal texts."""
        return hashlib.sha256(repr((self.text, self.tokens)).encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise `UserError` if the template is not valid Jinja, with the line of a syntax error."""
        try:
            self._render([], {})
        except TemplateError as error:  # such as too many nested blocks for Python
            raise UserError(f"{self.place}1: the chat template cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The conversation as text. `add_generation_prompt` appends the start of an assistant's message.

        Raises `TemplateError` if the template refuses the conversation or fails on it, and `UserError` if the template
        has a syntax error or exceeds the limits of time and memory.
        """
        if used := sorted(RENDERER_NAMES & (variables or {}).keys()):
            raise TemplateError(f"chat_template_kwargs cannot set {', '.join(used)}")
        values = {
            **dict(self.tokens),
            **(variables or {}),
            "tools": None if not tools else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        texts, spans = self._render([list(messages)], values)
        return Rendered(texts[0], tuple((int(start), int(end)) for start, end in (spans[0] if spans else ())))

    def _render(self, conversations: list[Any], values: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
        marks = "endgeneration" in self.text
        with template_errors(self.place):
            texts, spans = _render_function()(
                conversations, chat_template=self.text, return_assistant_tokens_mask=marks, **values
            )
            return texts, spans


@contextmanager
def template_errors(place: str = _UNNAMED) -> Iterator[None]:
    """Limit templates that are rendered within the context, and convert their errors as `ChatTemplate.render` does."""
    from jinja2 import TemplateSyntaxError

    from lmtrain.hf import template_limits

    _render_function()
    try:
        yield
    except TemplateSyntaxError as error:
        raise UserError(f"{place}{error.lineno}: not valid Jinja: {error}") from None
    except template_limits.TemplateLimitError as error:
        raise UserError(f"{_at(place, error)}the chat template {error}") from None
    except MemoryError as error:
        raise UserError(
            f"{_at(place, error)}the chat template uses more than {template_limits.MAX_BYTES >> 20:,} MiB of memory; "
            "is there a loop without an end, or a text that is repeated too often?"
        ) from None
    except RecursionError as error:
        line = _at(place, error)
        reason = "a macro calls itself without an end" if line else "nested too deeply"
        raise TemplateError(f"{line}{reason}") from None
    except Exception as error:  # a template can raise what any operation of Python raises
        raise TemplateError(f"{_at(place, error)}{str(error) or type(error).__name__}") from None


def _at(place: str, error: Exception) -> str:
    """The place of the innermost line of the template in an error's traceback, which Jinja has translated."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _TEMPLATE_FRAME]
    return f"{place}{lines[-1]}: " if lines else ""


@functools.cache
def _render_function() -> Any:
    """The function of transformers that renders templates, with limits, which then also apply to other callers."""
    prepare_hub()
    from transformers.utils import chat_template_utils

    from lmtrain.hf.template_limits import LimitedEnvironment

    name = "ImmutableSandboxedEnvironment"
    assert issubclass(LimitedEnvironment, getattr(chat_template_utils, name))
    setattr(chat_template_utils, name, LimitedEnvironment)
    return chat_template_utils.render_jinja_template


def read_templates(folder: str) -> dict[str, str]:
    """The templates of a tokenizer folder by name; that of `chat_template.jinja` is named "default"."""
    return {name: template.text for name, template in _templates(folder).items()}


def _templates(folder: str) -> dict[str, ChatTemplate]:
    folder = os.path.expanduser(folder)
    tokens = _special_tokens(folder)
    written = read_settings(folder).get("chat_template")
    place = f"{os.path.join(folder, SETTINGS_FILE)}: chat_template"
    if isinstance(written, list):
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in written):
            raise UserError(f"{place}: expected a text, or a list of maps with name and template")
        named = [(str(entry["name"]), str(entry["template"])) for entry in written]
        templates = {name: ChatTemplate(text, tokens, f"{place} {name}, line ") for name, text in named}
    else:
        templates = {DEFAULT_TEMPLATE: ChatTemplate(str(written), tokens, f"{place}, line ")} if written else {}
    for path in sorted(glob.glob(os.path.join(glob.escape(os.path.join(folder, _MORE_TEMPLATES)), "*.jinja"))):
        templates[os.path.basename(path).removesuffix(".jinja")] = _of_file(path, tokens)
    path = os.path.join(folder, TEMPLATE_FILE)
    return templates | ({DEFAULT_TEMPLATE: _of_file(path, tokens)} if os.path.isfile(path) else {})


def _of_file(path: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    try:
        with open(path, encoding="utf-8") as file:
            return ChatTemplate(file.read(), tokens, f"{path}:")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {not_utf8(error)}") from None


def tokenizer_contents(folder: str, template: ChatTemplate | None = None) -> dict[str, bytes]:
    """The files of a tokenizer folder that make it complete, by name. `template` becomes its default chat template.

    Templates of the folder `additional_chat_templates` are in tokenizer_config.json, their other place; as are tokens
    that only the tokenizer's class has, since the class may depend on a config.json.
    """
    folder = os.path.expanduser(folder)
    paths = {name: os.path.join(folder, name) for name in TOKENIZER_FILES}
    contents = {name: read_bytes(path) for name, path in paths.items() if os.path.isfile(path)}
    own = read_templates(folder)
    templates = own if template is None else own | {DEFAULT_TEMPLATE: template.text}
    by_class = read_declared(folder).by_class if contents else {}
    if by_class:
        contents[SETTINGS_FILE] = to_json({**read_settings(folder), **by_class})
    if contents and (templates != own or os.path.isdir(os.path.join(folder, _MORE_TEMPLATES))):
        settings = {**read_settings(folder), **by_class}
        settings.pop("chat_template", None)
        contents.pop(TEMPLATE_FILE, None)
        if templates.keys() == {DEFAULT_TEMPLATE}:
            contents[TEMPLATE_FILE] = templates[DEFAULT_TEMPLATE].encode()
        else:  # next to a list, chat_template.jinja would replace all of it
            settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        contents[SETTINGS_FILE] = to_json(settings)
    return contents


def find_template(folder: str, wanted: str | None, setting: str) -> ChatTemplate:
    """The template `wanted`: a file, a name of the tokenizer's templates, or a text; None for the tokenizer's default.

    Raises `UserError`, which names the `setting`, if there is none.
    """
    own = _templates(folder)
    known = f"; it has templates named {', '.join(sorted(own))}" if own else ""
    if wanted is None:
        if DEFAULT_TEMPLATE not in own:
            raise UserError(
                f"{setting}: the tokenizer {folder} has no default chat template{known}; add one, with its tokens, by "
                f"`lmtrain tokenizer extend {folder} --chat_template chatml --output NEW`, or set it to a Jinja file"
            )
        return own[DEFAULT_TEMPLATE]
    path = os.path.expanduser(wanted)
    if "\n" not in wanted and os.path.isfile(path):
        return _of_file(path, _special_tokens(folder))
    if wanted in own:
        return own[wanted]
    if "{{" in wanted or "{%" in wanted:
        return ChatTemplate(wanted, _special_tokens(folder), f"{setting}, line ")
    raise UserError(
        f"{setting}: {wanted}: no such file, and the tokenizer {folder} has no template of this name{known}; "
        f"`lmtrain tokenizer extend {folder} --chat_template chatml --output NEW` adds a shipped one to a tokenizer"
    )


def check_tokens(template: ChatTemplate, tokenizer: Tokenizer, setting: str) -> None:
    """Raise `UserError` if the tokenizer would split a token that the template writes, such as <|im_end|>."""
    if "strftime_now" in template.text:
        log.warning(f"{setting}: the chat template writes the date, so that other days give other tokens")
    backend = tokenizer.parsing_backend
    tokens = spelled_tokens(template.text)
    with tokenizer.errors():
        missing = [token for token in tokens if len(backend.encode(token, add_special_tokens=False).ids) > 1]
    if missing:
        raise UserError(
            f"{setting}: the template writes {missing[0]}, which is no token of {tokenizer.path}; add it with `lmtrain "
            f"tokenizer extend {tokenizer.path} --special_tokens '{','.join(missing)}' --output NEW`, or use another "
            "template"
        )


def spelled_tokens(text: str) -> list[str]:
    """The texts that are certainly meant as special tokens: those of the form `<|name|>`."""
    return list(dict.fromkeys(_SPELLED.findall(text)))


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer, before: Sequence[Mapping[str, str]] = ()) -> int | None:
    """The special token that the template writes after a reply; None if there is none.

    `before` are the messages that a conversation starts with. Raises `UserError` if the template fails.
    """
    messages = [*before, {"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
    try:
        text = template.render(messages).text
    except TemplateError as error:
        raise UserError(f"the chat template fails on a question with an answer: {error}") from None
    if PROBE not in text:
        return None
    backend = tokenizer.parsing_backend
    with tokenizer.errors():
        encoding = backend.encode(text, add_special_tokens=False)
    end = text.rfind(PROBE) + len(PROBE)
    after = (number for number, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if start >= end)
    return next((number for number in after if number in tokenizer.special_tokens), None)


def _special_tokens(folder: str) -> tuple[tuple[str, str], ...]:
    """The named tokens, which templates may use under these names."""
    return tuple(read_declared(folder).texts.items())
