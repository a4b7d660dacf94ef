"""A conversation with a model: the KV cache is kept between turns, and tokens come one by one."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lmtrain.generation.decode import SamplingSettings, choose, step
from lmtrain.hf.chat_template import ChatTemplate, TemplateError, end_of_turn
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.interface import LanguageModel
from lmtrain.runtime.errors import UserError

# Tokens that are read at once.
_CHUNK = 32


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
        self._params = params
        self._tokenizer = tokenizer
        self._template = template
        self._seq_len = seq_len
        self._settings = settings
        self._key = jax.random.key(seed)
        self._forgets = model.forgets
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._cache = model.apply({"params": params}, 1, seq_len, method="empty_cache")

        def read(params: Any, cache: Any, tokens_BS: Any, start: Any, last: Any, key: jax.Array) -> Any:
            apply = functools.partial(model.apply, {"params": params})
            return step(apply, cache, tokens_BS, start, lambda logits, _: choose(logits[0], key, settings)[None], last)

        self._step = jax.jit(read, donate_argnums=1)
        self._drawn = 0
        self._cached: list[int] = []
        self._messages: list[dict[str, str]] = list(self._first)
        self._ends = {tokenizer.eos_id, end_of_turn(template, tokenizer, self._first)}

    def clear(self) -> None:
        """Forget all messages except the system's."""
        self._messages = list(self._first)

    def say(self, text: str) -> Iterator[str]:
        """The reply to a message, in pieces of text.

        Raises `UserError` if the conversation does not fit into the model's context, or if the template refuses it.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        ids = self._encode(asked)
        room = self._seq_len - len(ids)
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens, which fill the model's context of {self._seq_len}; start a "
                "new one with /clear"
            )
        backend = self._tokenizer.parsing_backend
        new: list[int] = []
        shown = ""
        for _ in range(min(room, self._settings.max_new_tokens)):
            token = self._next([*ids, *new])
            if token in self._ends:
                break
            new.append(token)
            reply = backend.decode(new)
            if not reply.endswith("\ufffd"):  # part of a character
                yield reply[len(shown) :]
                shown = reply
        reply = backend.decode(new)
        yield reply[len(shown) :]
        self._messages = [*asked, {"role": "assistant", "content": reply}]

    def _next(self, ids: Sequence[int]) -> int:
        """The token after `ids`; those that the cache has already are not read again, except for the last one."""
        same = (a == b for a, b in zip(ids, self._cached, strict=False))
        at = min(sum(1 for _ in itertools.takewhile(bool, same)), len(ids) - 1)
        if self._forgets and at < len(self._cached) - 1:
            at = 0  # the cache has forgotten what came before
        key = jax.random.fold_in(self._key, self._drawn)
        token = None
        while at < len(ids):
            # padding is written behind the last token, which there must be room for
            size = _CHUNK if len(ids) - at > 1 and at + _CHUNK <= self._seq_len else 1
            part = list(ids[at : at + size])
            padded = np.array([part + [0] * (size - len(part))], np.int32)
            token, self._cache = self._step(self._params, self._cache, padded, at, len(part) - 1, key)
            at += len(part)
        self._cached, self._drawn = list(ids), self._drawn + 1
        assert token is not None
        return int(token[0])

    def _encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        try:
            text = self._template.render(messages, add_generation_prompt=True).text
        except TemplateError as error:
            raise UserError(f"the chat template fails: {error}") from None
        with self._tokenizer.errors():
            ids: list[int] = self._tokenizer.parsing_backend.encode(text, add_special_tokens=False).ids
        return ids
