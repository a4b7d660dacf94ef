"""A conversation: replies in pieces, of which each continues the conversation so far; what ends a reply."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from chat_tokenizer import write_chat_tokenizer
from models import quick

from lmtrain.generation.chat import Chat, ChatEncoder, Pieces
from lmtrain.generation.decode import SamplingSettings, sample
from lmtrain.hf.chat_template import ChatTemplate, find_template
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.runtime.errors import UserError

LENGTH, NEW = 128, 6
SIZES = {"seq_len": LENGTH, "hidden_dim": 16, "num_heads": 2}


WINDOW = {"layer_pattern": ["sliding", "full"], "sliding_window": 24, "num_layers": 2}
CONFIGS = {"full": Gpt2Config(**SIZES, num_layers=1), "windows": LlamaConfig(**SIZES, **WINDOW)}


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.long), "windows"])
def start(request, tmp_path_factory):
    """`start(template)`: a conversation with a tiny model; `start.alone(text)`: the greedy text after a prompt."""
    folder = str(write_chat_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer"))
    tokenizer = load_tokenizer(folder)
    model, params = quick.writing_model(CONFIGS[request.param], tokenizer.vocab_size)
    settings = SamplingSettings(NEW, temperature=0)

    def make(template=None, **more):
        return Chat(model, params, tokenizer, template or make.template, LENGTH, settings, **more)

    def alone(text):
        ids = tokenizer.parsing_backend.encode(text, add_special_tokens=False).ids
        new = sample(model, params, jnp.array(ids, jnp.int32), jax.random.key(0), settings, eos_id=tokenizer.eos_id)
        return tokenizer.parsing_backend.decode(new)

    make.template, make.alone, make.tokenizer = find_template(folder, None, "test"), alone, tokenizer
    return make


def test_each_reply_continues_the_conversation_so_far_and_clear_starts_again(start):
    chat, messages, replies = start(system="Be brief."), [{"role": "system", "content": "Be brief."}], []
    for text in ("Stars?", "Rain or snow or wind?"):
        messages.append({"role": "user", "content": text})
        replies.append("".join(chat.say(text)))
        assert replies[-1] == start.alone(start.template.render(messages, add_generation_prompt=True).text)
        messages.append({"role": "assistant", "content": replies[-1]})
    assert replies[0] != replies[1]
    chat.clear()
    assert "".join(chat.say("Stars?")) == replies[0]


def test_a_message_that_fills_the_context_is_refused_and_forgotten_and_a_failing_template_refused(start):
    with pytest.raises(UserError, match="division by zero"):
        start(ChatTemplate("{{ 1 / 0 }}"))
    chat, fresh = start(), start()
    with pytest.raises(UserError, match="128"):
        list(chat.say("stars " * LENGTH))
    assert list(chat.say("Stars?")) == list(fresh.say("Stars?"))


def test_the_token_that_the_template_writes_after_a_reply_ends_it(start):
    ends = ChatEncoder(start.tokenizer, start.template).ends
    assert ends == {start.tokenizer.eos_id, start.tokenizer.parsing_backend.token_to_id("<|im_end|>")}
    plain = ChatTemplate("{% for message in messages %}{{ message.content }} {% endfor %}")
    assert ChatEncoder(start.tokenizer, plain).ends - {None} == {start.tokenizer.eos_id}


@pytest.mark.parametrize("stops", [(), ("END",), ("xyz", "é!")])
@pytest.mark.parametrize("text", ["caf\u00e9! \U0001f600 END of it", "no stop, \u2603", "EN", "ENEND", "a\ufffd"])
def test_pieces_are_the_text_up_to_the_first_stop(text, stops):
    """Tokens are bytes, so that characters come in parts."""
    backend = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))
    ids, pieces, found = list(text.encode()), Pieces(backend, stops), []
    for number in range(1, len(ids) + 1):
        found.append(pieces.add(ids[:number]))
        if pieces.is_stopped:
            break
    found.append(pieces.add(ids[:number], is_last=True))
    ends = [text.index(stop) for stop in stops if stop in text]
    assert "".join(found) == pieces.text == text[: min(ends, default=len(text))]
    assert pieces.is_stopped == bool(ends)
    assert not any(piece.endswith("\ufffd") for piece in found[:-1])
