"""Sentencepiece models: training, and conversion to the `tokenizers` library, which tokenizes and is exported.

The conversion follows the model's own description: BPE or unigram, its normalization, byte fallback, the prefix space.
The ids are those of the sentencepiece library, with one exception: its single precision sums may prefer another of two
almost equally likely segmentations of a long text by a unigram model (72 of 3.2 million tokens of Python source; BPE:
none). Text that spells a control token (`<s>`) is plain text in sentencepiece; `save_tokenizer` sets
`split_special_tokens` in the folder, so that `tokenizers` also treats it as text.
"""

import io
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmtrain.config.errors import UserError
from lmtrain.runtime.logging import log

# The unknown, begin and end tokens, the bytes, and the prefix space of every text.
SMALLEST_VOCABULARY = 3 + 256 + 1

# Types of pieces in a sentencepiece model.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"

_PIECE_CHARACTERS = 1000  # at most 4000 bytes; sentencepiece drops what is longer than 4192
_LINE_ENDS = re.compile("[\n▅]")  # sentencepiece uses ▅ internally, and drops lines with it

# Settings as in Llama. One thread, since the float sums of unigram depend on the number of threads.
_TRAINING: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "add_dummy_prefix": True,
    "byte_fallback": True,
    "split_digits": True,
    "character_coverage": 0.99995,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
    "num_threads": 1,
    "minloglevel": 2,
}


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    model_type: str,
    input_sentence_size: int,
    special_tokens: Sequence[str] = (),
) -> bytes:
    """Train a model; returns the content of a `.model` file of `vocab_size` pieces. Equal texts give equal bytes.

    `model_type` is bpe or unigram; `special_tokens` are added to <unk>, <s> and </s>. At most `input_sentence_size`
    lines of up to 1000 characters are used. Any text can be encoded, with bytes if necessary, and decoding restores it,
    except that U+2581, which sentencepiece uses for a space, is decoded as a space. Raises `UserError` if `vocab_size`
    is too large or too small for the texts.
    """
    import sentencepiece

    lines, seen = _sample(_lines(texts), input_sentence_size)
    if not lines:
        raise UserError("no text to train on: all documents are empty")
    log.info(f"training on {len(lines):,} of {seen:,} lines of text")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_consume(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            control_symbols=list(special_tokens),
            **_TRAINING,
        )
    except RuntimeError as error:
        raise _explain(error, vocab_size) from None
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Sentences for sentencepiece: lines, with long lines split into pieces, since it drops lines that are too long.

    Lines are split at spaces, which the pieces lack: sentencepiece adds a space before each sentence.
    """
    for text in texts:
        for line in _LINE_ENDS.split(text):
            start = 0
            while len(line) - start > _PIECE_CHARACTERS:
                space = line.rfind(" ", start + 1, start + _PIECE_CHARACTERS)
                cut = start + _PIECE_CHARACTERS if space < 0 else space
                yield line[start:cut]
                start = cut if space < 0 else cut + 1
            if start < len(line):
                yield line[start:]


def _sample(lines: Iterable[str], size: int) -> tuple[list[str], int]:
    """Sample at most `size` lines uniformly; returns them and the total number of lines.

    Reservoir sampling reads all lines and holds `size`. The sampling of sentencepiece draws other lines in every
    process, whatever its seed.
    """
    random_numbers = random.Random(0)
    kept: list[str] = []
    seen = 0
    for line in lines:
        seen += 1
        if len(kept) < size:
            kept.append(line)
        elif (place := int(random_numbers.random() * seen)) < size:
            kept[place] = line
    return kept, seen


def _consume(lines: list[str]) -> Iterator[str]:
    """Yield and drop the lines one by one, since sentencepiece makes its own copies."""
    lines.reverse()
    while lines:
        yield lines.pop()


def _explain(error: RuntimeError, vocab_size: int) -> UserError:
    """Translate an error of sentencepiece, whose messages refer to its source files and flags."""
    text = str(error)
    if most := re.search(r"Vocabulary size too high .* value <= (\d+)", text):
        return UserError(f"vocab_size {vocab_size}: too large for this text: at most {most[1]} pieces")
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return UserError(
            f"vocab_size {vocab_size}: too small for this text: its characters and the bytes require {least[1]}"
        )
    return UserError(f"sentencepiece training failed: {text}")


def convert_sentencepiece(content: bytes, name: str) -> tuple[Tokenizer, str | None, str | None]:
    """Convert the content of a `.model` file; returns the tokenizer and its end and begin tokens, if any.

    `name` is used in errors.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # defined at import
    try:
        proto.ParseFromString(content)
    except Exception as error:  # the error class of protobuf has no stable import path
        raise UserError(f"tokenizer {name!r}: not a sentencepiece model: {error}") from None
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    kind = proto.trainer_spec.model_type
    if not pieces or kind not in (_UNIGRAM, _BPE):
        raise UserError(f"tokenizer {name!r}: not a sentencepiece model of kind bpe or unigram")
    tokenizer = Tokenizer(_bpe(pieces, proto) if kind == _BPE else _unigram(pieces, proto))
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    if alone := _never_in_longer_pieces(pieces, proto):
        pattern = "|".join(map(re.escape, sorted(alone, key=len, reverse=True)))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else [])
    )
    tokenizer.add_special_tokens([piece for piece, _, type_ in pieces if type_ == _CONTROL])
    if not proto.normalizer_spec.add_dummy_prefix:
        tokenizer.add_tokens(sorted(_defined_by_user(pieces)))
    spec = proto.trainer_spec
    ends = [pieces[number][0] if 0 <= number < len(pieces) else None for number in (spec.eos_id, spec.bos_id)]
    return tokenizer, ends[0], ends[1]


def _defined_by_user(pieces: list[tuple[str, float, int]]) -> set[str]:
    return {piece for piece, _, type_ in pieces if type_ == _USER}


def _never_in_longer_pieces(pieces: list[tuple[str, float, int]], proto: Any) -> set[str]:
    """Strings to isolate from a text before tokenization. No longer piece contains them, so other pieces do not change.

    First, user-defined symbols in models with a prefix space: as added tokens they would match only after a space.
    Second, characters that a unigram model lacks but that occur in the name of a byte (`<0x0A>`): the score of an
    unknown character is below that of all pieces, so text that spells the name would be encoded as the byte.
    """
    alone = _defined_by_user(pieces) if proto.normalizer_spec.add_dummy_prefix else set()
    if proto.trainer_spec.model_type == _UNIGRAM and proto.trainer_spec.byte_fallback:
        spelled = {letter for piece, _, type_ in pieces if type_ not in (_NORMAL, _USER) for letter in piece}
        alone |= spelled - {piece for piece, _, _ in pieces}
    return alone


def _unigram(pieces: list[tuple[str, float, int]], proto: Any) -> models.Unigram:
    """Unigram model. Names of bytes and control pieces get a score below that of any spelling by letters, since the
    library treats them as ordinary pieces."""
    worst = min([0.0, *(score for _, score, type_ in pieces if type_ == _NORMAL)])
    never = (worst - 1) * max(len(piece) for piece, _, _ in pieces)
    vocabulary = [(piece, score if type_ in (_NORMAL, _USER) else never) for piece, score, type_ in pieces]
    return models.Unigram(vocabulary, unk_id=proto.trainer_spec.unk_id, byte_fallback=proto.trainer_spec.byte_fallback)


def _bpe(pieces: list[tuple[str, float, int]], proto: Any) -> models.BPE:
    """BPE model. Sentencepiece stores no merges: any two pieces that form a third may merge, best scores first."""
    ids = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    merges = []
    for piece, score, type_ in pieces:
        if type_ in (_NORMAL, _USER):
            halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            known = [(left, right) for left, right in halves if left in ids and right in ids]
            merges += [(-score, ids[left], ids[right], left, right) for left, right in known]
    unknown = next((piece for piece, _, type_ in pieces if type_ == _UNKNOWN), None)
    return models.BPE(
        ids,
        [(left, right) for _, _, _, left, right in sorted(merges)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        # no merges lead to user-defined symbols, which are isolated before
        ignore_merges=proto.normalizer_spec.add_dummy_prefix and bool(_defined_by_user(pieces)),
    )


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)
