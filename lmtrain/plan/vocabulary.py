"""The vocabulary size of a run without its tokenizer: nothing is downloaded, and no file needs to exist."""

import os

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.prepare_demo import VOCAB_SIZE, missing_demo_tokenizer

# Vocabulary sizes of public tokenizers, including added tokens, as counted by the library `tokenizers`.
KNOWN = {
    "gpt2": 50257,
    "openai-community/gpt2": 50257,
    "EleutherAI/gpt-neox-20b": 50277,
    "mosaicml/mpt-7b": 50277,
    "meta-llama/Llama-2-7b-hf": 32000,
    "meta-llama/Llama-2-13b-hf": 32000,
    "meta-llama/Llama-2-70b-hf": 32000,
    "NousResearch/Llama-2-7b-hf": 32000,
    "meta-llama/Meta-Llama-3-8B": 128256,
    "meta-llama/Meta-Llama-3-8B-Instruct": 128256,
    "meta-llama/Meta-Llama-3-70B": 128256,
    "meta-llama/Llama-3.1-8B": 128256,
    "meta-llama/Llama-3.2-1B": 128256,
    "mistralai/Mistral-7B-v0.1": 32000,
    "google/gemma-2b": 256000,
    "google/gemma-7b": 256000,
    "stanford-crfm/backpack-gpt2": 50257,
    "byte": 257,
}

# Made by tools/demo_chat.py: the demo's tokenizer with two more tokens.
DEMO_CHAT = "demo/chat/tokenizer"


def find_vocab_size(data: DataConfig, given: int | None) -> tuple[int, str]:
    """The number of tokens, and its origin for the report.

    In this order: `given` on the command line, `data.vocab_size`, an existing local tokenizer, the table of known
    names. Raises `UserError` if none of them has it.
    """
    if given is not None:
        if given < 1:
            raise UserError(f"--vocab_size: expected 1 or more, got {given}")
        return given, "--vocab_size"
    if data.vocab_size is not None:
        return data.vocab_size, "data.vocab_size"
    if missing_demo_tokenizer(data):
        return VOCAB_SIZE, "the demo tokenizer, which is not built yet"
    name = data.tokenizer
    if name == DEMO_CHAT and not os.path.exists(name):
        return VOCAB_SIZE + 2, "the chat tokenizer of the demo, which is not built yet"
    if os.path.exists(os.path.expanduser(name)):
        from lmtrain.hf.find_tokenizer import open_tokenizer

        return open_tokenizer(name).vocab_size, f"tokenizer {name}"
    known = KNOWN.get(name.partition("@")[0])
    if known is not None:
        return known, f"known size of {name}"
    raise UserError(
        f"the vocabulary size of data.tokenizer {name} is unknown without downloading it; add --vocab_size N"
    )
