"""A conversation with a model: the KV cache is kept between turns, and tokens come one by one."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.generation.sample import SamplingSettings, choose
from lmtrain.hf.chat_template import ChatTemplate, TemplateError
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.interface import LanguageModel

# Tokens that are read at once.
_CHUNK = 32
# Stands for a reply when looking for the token that ends one.
_REPLY = "x"


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
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._cache = model.apply({"params": params}, 1, seq_len, method="empty_cache")
        self._extend = jax.jit(functools.partial(_extend, model), donate_argnums=1)
        self._choose = jax.jit(functools.partial(choose, settings=settings))
        self._drawn = 0
        self._cached: list[int] = []
        self._messages: list[dict[str, str]] = list(self._first)
        self._ends = self._end_tokens()

    def clear(self) -> None:
        """Forget all messages except the system's."""
        self._messages = list(self._first)

    def say(self, text: str) -> Iterator[str]:
        """The reply to a message, in pieces of text.

        Raises `UserError` if the conversation does not fit into the model's context, or if the template refuses it.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        ids = self._encode(asked, add_generation_prompt=True)
        room = self._seq_len - len(ids)
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens, which fill the model's context of {self._seq_len}; start a "
                "new one with /clear"
            )
        logits = self._read(ids)
        backend = self._tokenizer.parsing_backend
        new: list[int] = []
        shown = ""
        for _ in range(min(room, self._settings.max_new_tokens)):
            token = int(self._choose(logits, jax.random.fold_in(self._key, self._drawn)))
            self._drawn += 1
            if token in self._ends:
                break
            new.append(token)
            reply = backend.decode(new)
            if not reply.endswith("\ufffd"):  # part of a character
                yield reply[len(shown) :]
                shown = reply
            logits = self._read([*ids, *new])
        reply = backend.decode(new)
        yield reply[len(shown) :]
        self._messages = [*asked, {"role": "assistant", "content": reply}]

    def _read(self, ids: Sequence[int]) -> jax.Array:
        """Logits [V] after the tokens; those that the cache has already are not read again, except for the last one."""
        same = next((at for at, (a, b) in enumerate(zip(ids, self._cached, strict=False)) if a != b), None)
        at = min(len(ids), len(self._cached)) if same is None else same
        at = min(at, len(ids) - 1)
        logits = None
        while at < len(ids):
            # padding is written behind the last token, which there must be room for
            size = _CHUNK if len(ids) - at > 1 and at + _CHUNK <= self._seq_len else 1
            part = list(ids[at : at + size])
            padded = np.array([part + [0] * (size - len(part))], np.int32)
            logits, self._cache = self._extend(self._params, self._cache, padded, at, len(part) - 1)
            at += len(part)
        self._cached = list(ids)
        assert logits is not None
        return logits

    def _encode(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> list[int]:
        try:
            text = self._template.render(messages, add_generation_prompt=add_generation_prompt).text
        except TemplateError as error:
            raise UserError(f"the chat template fails: {error}") from None
        ids: list[int] = self._tokenizer.parsing_backend.encode(text, add_special_tokens=False).ids
        return ids

    def _end_tokens(self) -> set[int]:
        """The EOS token, and the special token that the template writes after a reply."""
        ends = {self._tokenizer.eos_id} - {None}
        special = {
            number
            for number, token in self._tokenizer.parsing_backend.get_added_tokens_decoder().items()
            if token.special
        }
        messages = [*self._first, {"role": "user", "content": _REPLY}]
        asked = self._encode(messages, add_generation_prompt=True)
        answered = self._encode([*messages, {"role": "assistant", "content": _REPLY}], add_generation_prompt=False)
        after = next((token for token in answered[len(asked) :] if token in special), None)
        return {number for number in (*ends, after) if number is not None}


def _extend(
    model: LanguageModel, params: Any, cache: Any, tokens: jax.Array, start: jax.Array, last: jax.Array
) -> tuple[jax.Array, Any]:
    """Logits [V] after token `last` of `tokens` [1, S], which are read from position `start` on."""
    logits, cache = model.apply({"params": params}, tokens, cache, start, method="extend")
    return jnp.asarray(logits)[0, last], cache
