"""Chat templates of tokenizers, rendered in transformers' sandbox."""

import functools
import glob
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.hub import prepare_hub
from lmtrain.hf.tokenizer import SETTINGS_FILE, TOKENIZER_FILES, Tokenizer, read_settings, to_json, token_text

TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_DEFAULT = "default"

# Keys of tokenizer_config.json whose tokens templates may use, under the same names.
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# Texts in a template that are certainly meant as one token.
_SPELLED = re.compile(r"<\|[^|<>\s{}'\"]+\|>")


class TemplateError(Exception):
    """A template that fails on a conversation, with the reason that the template or the sandbox gives."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the parts that `{% generation %}` marks, as [start, end) in characters."""

    text: str
    generated: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may use as variables."""

    text: str
    tokens: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Hash of the template and its tokens: equal ones give equal texts."""
        return hashlib.sha256(repr((self.text, self.tokens)).encode()).hexdigest()[:16]

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks what the assistant writes."""
        return "endgeneration" in self.text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The conversation as text. `add_generation_prompt` appends the start of an assistant's message.

        Raises `TemplateError` if the template refuses the conversation.
        """
        render, jinja_error = _renderer()
        values = {**dict(self.tokens), **(variables or {})}
        try:
            texts, marks = render(
                [list(messages)],
                tools=None if not tools else list(tools),
                chat_template=self.text,
                return_assistant_tokens_mask=self.marks_generation,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (jinja_error, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(str(error) or type(error).__name__) from None
        spans = marks[0] if self.marks_generation and marks else []
        return Rendered(texts[0], tuple((int(start), int(end)) for start, end in spans))


@functools.cache
def _renderer() -> tuple[Any, type[Exception]]:
    """The function of transformers that renders templates, and the class of their errors; imported at the first use."""
    prepare_hub()
    from jinja2 import TemplateError as JinjaError
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template, JinjaError


def read_templates(folder: str) -> dict[str, str]:
    """The templates of a tokenizer folder by name; that of `chat_template.jinja` is named "default"."""
    folder = os.path.expanduser(folder)
    written = read_settings(folder).get("chat_template")
    if isinstance(written, list):
        found = {str(entry["name"]): str(entry["template"]) for entry in written}
    else:
        found = {_DEFAULT: str(written)} if written else {}
    for path in sorted(glob.glob(os.path.join(glob.escape(os.path.join(folder, _MORE_TEMPLATES)), "*.jinja"))):
        found[os.path.basename(path).removesuffix(".jinja")] = _read(path)
    path = os.path.join(folder, TEMPLATE_FILE)
    return found | ({_DEFAULT: _read(path)} if os.path.isfile(path) else {})


def tokenizer_contents(folder: str) -> dict[str, bytes]:
    """The files of a tokenizer folder that make it complete, by name.

    Templates of the folder `additional_chat_templates` are in tokenizer_config.json, their other place.
    """
    folder = os.path.expanduser(folder)
    contents = {}
    for name in TOKENIZER_FILES:
        if os.path.isfile(path := os.path.join(folder, name)):
            with open(path, "rb") as file:
                contents[name] = file.read()
    if os.path.isdir(os.path.join(folder, _MORE_TEMPLATES)):
        named = [{"name": name, "template": text} for name, text in sorted(read_templates(folder).items())]
        contents.pop(TEMPLATE_FILE, None)
        contents[SETTINGS_FILE] = to_json(read_settings(folder) | {"chat_template": named})
    return contents


def find_template(folder: str, wanted: str | None, setting: str) -> ChatTemplate:
    """The template `wanted`: a file, a name of the tokenizer's templates, or a text; None for the tokenizer's default.

    Raises `UserError`, which names the `setting`, if there is none.
    """
    own = read_templates(folder)
    tokens = _special_tokens(folder)
    if wanted is None:
        if _DEFAULT not in own:
            others = f" (it has templates named {', '.join(sorted(own))})" if own else ""
            raise UserError(
                f"{setting}: the tokenizer {folder} has no default chat template{others}; set it to a Jinja file, or "
                f"add {TEMPLATE_FILE} to the tokenizer's folder"
            )
        return ChatTemplate(own[_DEFAULT], tokens)
    path = os.path.expanduser(wanted)
    if "\n" not in wanted and os.path.isfile(path):
        return ChatTemplate(_read(path), tokens)
    if wanted in own:
        return ChatTemplate(own[wanted], tokens)
    if "{{" in wanted or "{%" in wanted:
        return ChatTemplate(wanted, tokens)
    known = f"; the tokenizer's templates are {', '.join(sorted(own))}" if own else ""
    raise UserError(
        f"{setting}: {wanted}: no such file, and the tokenizer {folder} has no template of this name{known}"
    )


def check_tokens(template: ChatTemplate, tokenizer: Tokenizer, setting: str) -> None:
    """Raise `UserError` if the tokenizer would split a token that the template writes, such as <|im_end|>."""
    backend = tokenizer.parsing_backend
    for token in dict.fromkeys(_SPELLED.findall(template.text)):
        if len(backend.encode(token, add_special_tokens=False).ids) > 1:
            raise UserError(
                f"{setting}: the template writes {token}, which is no token of {tokenizer.path}; train the tokenizer "
                f"with --special_tokens '{token}', or use another template"
            )


def _special_tokens(folder: str) -> tuple[tuple[str, str], ...]:
    settings = read_settings(folder)
    named = ((name, token_text(settings.get(name))) for name in _TOKENS)
    return tuple((name, text) for name, text in named if text is not None)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
