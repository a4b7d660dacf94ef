"""A chat server with a tiny model, for tests of its clients."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

from chat_tokenizer import write_chat_tokenizer
from models import quick

from lmtrain.generation.chat import ChatEncoder
from lmtrain.generation.decode import SamplingSettings
from lmtrain.generation.engine import Engine
from lmtrain.generation.server import ChatServer, Replies
from lmtrain.hf.chat_template import find_template
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.gpt2.config import Gpt2Config

LENGTH = 128


@contextmanager
def serve(folder, parallel, length=LENGTH, **settings):
    """What a server at `url` was made of."""
    path = str(write_chat_tokenizer(folder / "tokenizer"))
    tokenizer, template = load_tokenizer(path), find_template(path, None, "test")
    config = Gpt2Config(seq_len=length, hidden_dim=16, num_heads=2, num_layers=1)
    model, params = quick.writing_model(config, tokenizer.vocab_size)
    engine = Engine(model, params, length, parallel)
    with ChatServer("tiny/model", 0) as server:
        default = SamplingSettings(**{"max_new_tokens": 16} | settings)
        server.replies = Replies(engine, ChatEncoder(tokenizer, template), default)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(
            url=server.url,
            name="tiny/model",
            model=model,
            params=params,
            tokenizer=tokenizer,
            template=template,
            engine=engine,
        )
        server.shutdown()
