"""Prompts as token ids."""

from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str, setting: str, bos: bool) -> list[int]:
    """Token ids of the prompt, at least one: an empty prompt is the bos token, or else the eos token.

    With `bos` it starts with the bos token, as the documents of training do.

    Raises `UserError`, which names the `setting`, for an empty prompt if the tokenizer has neither.
    """
    with tokenizer.errors():
        ids: list[int] = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    if ids:
        return [tokenizer.bos_id, *ids] if bos and tokenizer.bos_id not in (None, ids[0]) else ids
    first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if first is None:
        raise UserError(f"{setting}: an empty prompt needs a tokenizer with a bos or eos token")
    return [first]
