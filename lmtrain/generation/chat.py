"""Conversations with a model: messages as tokens, tokens as pieces of text, and a conversation of one user."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmtrain.generation.decode import SamplingSettings
from lmtrain.generation.engine import Engine, Request
from lmtrain.hf.chat_template import ChatTemplate, TemplateError, end_of_turn
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.interface import LanguageModel
from lmtrain.runtime.errors import UserError


class ChatEncoder:
    """Messages as the tokens that a template makes of them, and `ends`, the tokens that end a reply.

    Raises `UserError` if the template refuses messages.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, system: str | None = None):
        self.backend = tokenizer.parsing_backend
        self._tokenizer = tokenizer
        self._template = template
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.ends = {tokenizer.eos_id, end_of_turn(template, tokenizer, self.first)}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), add_generation_prompt: bool = True
    ) -> str:
        """The text that the model continues. Raises `UserError` for tools that the template does not write, too."""

        def rendered(tools: Sequence[Any] | None) -> str:
            return self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).text

        try:
            text = rendered(tools or None)
            if tools and text == rendered(None):
                raise UserError("tools: the chat template does not write them; remove them")
        except TemplateError as error:
            raise UserError(f"the chat template fails: {error}") from None
        return text

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text."""
        with self._tokenizer.errors():
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids


class Pieces:
    """The text of tokens that come one by one, in pieces: complete characters, up to the first of the texts `stops`."""

    def __init__(self, backend: Any, stops: Sequence[str] = ()):
        self.text = ""
        self.is_stopped = False
        self._backend = backend
        self._stops = stops
        self._shown = 0

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """What all tokens so far add to the text. The last piece has everything that was held back."""
        text = self._backend.decode(list(tokens))
        found = [text.index(stop) for stop in self._stops if stop in text]
        self.is_stopped = bool(found)
        if found:
            text = text[: min(found)]
        elif not is_last:
            text = text.rstrip("\ufffd")  # part of a character
            held = [size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
            text = text[: len(text) - max(held, default=0)]
        if len(text) <= self._shown and not is_last and not found:
            return ""
        piece, self.text, self._shown = text[self._shown :], text, len(text)
        return piece


class Chat:
    """A conversation. `say(text)` yields the reply in pieces; `clear()` starts again, with the system message.

    The same seed and messages give the same replies.
    """

    def __init__(
        self,
        model: LanguageModel,
        params: Any,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        seq_len: int,
        settings: SamplingSettings,
        seed: int = 0,
        system: str | None = None,
    ):
        self._encoder = ChatEncoder(tokenizer, template, system)
        self._engine = Engine(model, params, seq_len, rows=1)
        self._settings = settings
        self._seed = seed
        self._messages: list[dict[str, str]] = list(self._encoder.first)

    def clear(self) -> None:
        """Forget all messages except the system's."""
        self._messages = list(self._encoder.first)

    def say(self, text: str) -> Iterator[str]:
        """The reply to a message, in pieces of text.

        Raises `UserError` if the conversation does not fit into the model's context, or if the template refuses it.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        ids = self._encoder.encode(self._encoder.render(asked))
        if len(ids) >= self._engine.seq_len:
            raise UserError(
                f"the conversation has {len(ids)} tokens, which fill the model's context of {self._engine.seq_len}; "
                "start a new one with /clear"
            )
        request = Request(ids=ids, settings=self._settings, seed=self._seed, ends=self._encoder.ends)
        self._engine.add(request)
        pieces = Pieces(self._encoder.backend)
        while self._engine.step():
            if piece := pieces.add(request.new):
                yield piece
        yield pieces.add(request.new, is_last=True)
        self._messages = [*asked, {"role": "assistant", "content": pieces.text}]
