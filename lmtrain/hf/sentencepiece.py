"""Sentencepiece models: training them, and as objects of the `tokenizers` library, which tokenizes and is exported.

The conversion follows the model's own description: BPE or unigram, its normalisation, byte fallback, the prefix space.
The ids are those of the sentencepiece library, but for one thing: between readings of a long text that a unigram
model finds as good as equal, its sums in single precision may decide otherwise (72 of 3.2 million tokens of Python
source; BPE: none). Text that spells a control token (`<s>`) is text there; `tokenizers` has to be told so, which
`save_tokenizer` notes in the folder.
"""

import io
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmtrain.config.errors import UserError
from lmtrain.runtime.logging import log

# Unknown, begin, end, the bytes, and a space, which every text begins with.
SMALLEST_VOCABULARY = 3 + 256 + 1

# Types of pieces in a sentencepiece model.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"

_PIECE_CHARACTERS = 1000  # at most 4000 bytes; sentencepiece drops what is longer than 4192
_LINE_ENDS = re.compile("[\n▅]")  # sentencepiece has a use of its own for ▅, and drops lines that have it

# As Llama's. Unigram's sums of floats depend on the number of threads.
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


def train_sentencepiece(texts: Iterable[str], vocab_size: int, model_type: str, input_sentence_size: int) -> bytes:
    """The content of a `.model` file of `vocab_size` pieces; the same texts always give the same bytes.

    `model_type` is bpe or unigram; at most `input_sentence_size` lines, of up to 1000 characters, are learned from.
    Any text encodes, by bytes if need be, and decoding gives it back; only U+2581, which is how sentencepiece writes a
    space, comes back as one. Raises `UserError` if the texts have too few or too many different parts for `vocab_size`.
    """
    import sentencepiece

    lines, seen = _sample(_lines(texts), input_sentence_size)
    if not lines:
        raise UserError("there is no text to learn from: all documents are empty")
    log.info(f"learning from {len(lines):,} of {seen:,} lines of text")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_handing_over(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            **_TRAINING,
        )
    except RuntimeError as error:
        raise _explained(error, vocab_size) from None
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """What sentencepiece calls sentences: lines, and long lines in pieces, as it would drop what is too long.

    They are cut at spaces, which the pieces then lack: each sentence begins as if there were one before it.
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
    """At most `size` lines, each equally likely, and how many there were.

    Reservoir sampling, which reads all and holds `size`. Sentencepiece has it too, but draws other lines in every
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


def _handing_over(lines: list[str]) -> Iterator[str]:
    """Sentencepiece makes copies of its own, so that each line is let go of when it is taken."""
    lines.reverse()
    while lines:
        yield lines.pop()


def _explained(error: RuntimeError, vocab_size: int) -> UserError:
    """Sentencepiece's own messages name its source files and flags."""
    text = str(error)
    if most := re.search(r"Vocabulary size too high .* value <= (\d+)", text):
        return UserError(f"vocab_size {vocab_size}: too large for this text, which makes at most {most[1]} pieces")
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return UserError(
            f"vocab_size {vocab_size}: too small for this text, whose characters and the bytes alone are {least[1]}"
        )
    return UserError(f"sentencepiece cannot learn from this text: {text}")


def convert_sentencepiece(content: bytes, name: str) -> tuple[Tokenizer, str | None, str | None]:
    """The tokenizer in a `.model` file, and its end and begin tokens if it has them. `name` is for errors."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made when imported
    try:
        proto.ParseFromString(content)
    except Exception as error:  # protobuf's own kind of error is not importable by a stable name
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
    """What is cut out of a text before anything else; no piece reaches across it, so that other pieces stay the same.

    Symbols that the user defined, in models with a prefix space: as added tokens they would match after a space only.
    And characters that a unigram model lacks, but that the name of a byte (`<0x0A>`) is spelled with: the score of an
    unknown character is below that of all pieces, and the byte would be taken for the better reading of its name.
    """
    alone = _defined_by_user(pieces) if proto.normalizer_spec.add_dummy_prefix else set()
    if proto.trainer_spec.model_type == _UNIGRAM and proto.trainer_spec.byte_fallback:
        spelled = {letter for piece, _, type_ in pieces if type_ not in (_NORMAL, _USER) for letter in piece}
        alone |= spelled - {piece for piece, _, _ in pieces}
    return alone


def _unigram(pieces: list[tuple[str, float, int]], proto: Any) -> models.Unigram:
    """The library takes the names of bytes and control pieces for words like any other, so their score is made worse
    than that of any spelling by letters."""
    worst = min([0.0, *(score for _, score, type_ in pieces if type_ == _NORMAL)])
    never = (worst - 1) * max(len(piece) for piece, _, _ in pieces)
    vocabulary = [(piece, score if type_ in (_NORMAL, _USER) else never) for piece, score, type_ in pieces]
    return models.Unigram(vocabulary, unk_id=proto.trainer_spec.unk_id, byte_fallback=proto.trainer_spec.byte_fallback)


def _bpe(pieces: list[tuple[str, float, int]], proto: Any) -> models.BPE:
    """Sentencepiece keeps no list of merges: any two pieces that make a third may merge, the best scores first."""
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
        # no merges lead to symbols that the user defined, which are cut out whole
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
