"""Training of a byte-level BPE tokenizer from text."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def learn_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), show_progress: bool = False
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE as in GPT-2: any text can be encoded, and decoding restores it exactly.

    The vocabulary has `vocab_size` entries (fewer if the text has fewer pairs to merge): the end-of-text token,
    `special_tokens`, the 256 bytes, and the merges, most frequent first.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
