"""Sentencepiece models: their file, training, and conversion to the `tokenizers` library, which tokenizes and is
exported.

The conversion follows the model's own description: BPE or unigram, its normalization, byte fallback, the added space.
The ids are those of the sentencepiece library, with one exception: its single precision sums may prefer another of two
almost equally likely segmentations of a long text by a unigram model (72 of 3.2 million tokens of Python source; BPE:
none). A model that the `tokenizers` library cannot represent is an error. Text that spells a control token (`<s>`) is
plain text in sentencepiece; `save_tokenizer` sets `split_special_tokens` in the folder, so that `tokenizers` also
treats it as text. The decoded text is that of the library, except that `<unk>` has its own name instead of ` ⁇ `.
"""

import functools
import io
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmtrain.hf.sentencepiece_normalizer import SPACE, build_normalizers, literal
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.text import refuse_pointer

# BPE and unigram models of sentencepiece as models of the `tokenizers` library.
#
# `tokenizers` finds each entry of its vocabulary in the text. Sentencepiece does not find the names of reserved pieces,
# such as `<s>` or `<0x0A>`, in a text that spells them. What prevents this depends on the characters of the name:
#
# * One that occurs in no piece is isolated from the rest of the text, since the bytes that represent it are not
# affected,
#   or, in a model without bytes, replaced by another such character, since all of them are equally unknown.
# * Otherwise, a unigram model never prefers the name if its score is below that of its characters. In a BPE model,
#   no merges lead to it; see `build_bpe` for the exception.

# Types of pieces in a sentencepiece model.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5

# Score of a user-defined symbol in a unigram model, for each byte except the first.
_BYTE_OF_SYMBOL = 0.1


@dataclass(frozen=True)
class Pieces:
    """Text, score and type of all pieces in the order of their ids; whether unknown characters become bytes."""

    all: tuple[tuple[str, float, int], ...]
    byte_fallback: bool

    def of(self, *kinds: int) -> list[str]:
        """Texts of the pieces of some types."""
        return [text for text, _, kind in self.all if kind in kinds]

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        return frozenset(self.of(USER))

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the pieces that no text is encoded as."""
        return [text for text, _, kind in self.all if kind not in (NORMAL, USER)]

    @functools.cached_property
    def single(self) -> set[str]:
        """Characters that are pieces."""
        return {text for text in self.of(NORMAL, USER) if len(text) == 1}

    @functools.cached_property
    def lacking(self) -> set[str]:
        """Characters of normal pieces that are no pieces themselves."""
        return {letter for text in self.of(NORMAL) for letter in text} - self.single

    def absent(self, names: Iterable[str]) -> set[str]:
        """Characters of the names that occur in no piece, except in symbols defined by the user."""
        return {letter for name in names for letter in name} - self.single - self.lacking

    @property
    def unknown_letter(self) -> str:
        """A character that occurs in no piece and no name."""
        used = {letter for text, _, _ in self.all for letter in text}
        return next(letter for letter in map(chr, range(0xE000, 0x110000)) if letter not in used)

    def outside_symbols(self, letter: str) -> str:
        """Pattern of a character except within symbols defined by the user."""
        within = [
            f"(?<={literal(text[:place])})" * (place > 0) + literal(text[place:])
            for text in sorted(self.symbols)
            for place in range(len(text))
            if text[place] == letter
        ]
        return f"(?!{'|'.join(within)}){literal(letter)}" if within else re.escape(letter)


def build_unigram(pieces: Pieces, unknown_id: int) -> tuple[models.Unigram, str, str]:
    """Unigram model, pattern of what is isolated in the text, pattern of what is replaced by an unknown character.

    Raises `ValueError` if `tokenizers` would encode some texts with other ids.
    """
    absent = pieces.absent(pieces.names)
    spelled = [name for name in pieces.names if not absent.intersection(name)]
    if pieces.byte_fallback:
        spelled += [name for name in pieces.names if name in absent]
    if (spelled and pieces.lacking) or any(len(name) == 1 for name in spelled):
        raise ValueError(f"a text could spell the reserved piece {spelled[0]!r}")
    scores = [score for _, score, kind in pieces.all if kind == NORMAL]
    # tokenizers derives the score of unknown characters from the lowest one: a lower one must not make a difference
    lowest = min(scores, default=0.0)
    never = lowest if pieces.lacking else (min(lowest, 0.0) - 1) * max(len(text) for text, _, _ in pieces.all)
    model = models.Unigram(
        [
            (text, score if kind == NORMAL else _BYTE_OF_SYMBOL * (len(text.encode()) - 1) if kind == USER else never)
            for text, score, kind in pieces.all
        ],
        unk_id=unknown_id,
        byte_fallback=pieces.byte_fallback,
    )
    pattern = "|".join(pieces.outside_symbols(letter) for letter in sorted(absent))
    return (model, pattern, "") if pieces.byte_fallback else (model, "", pattern)


def build_bpe(pieces: Pieces, isolate_symbols: bool) -> tuple[models.BPE, str, str]:
    """BPE model, pattern of what is isolated in the text, pattern of what is replaced by an unknown character.

    Sentencepiece stores no merges: any two pieces that form a third may merge, best scores first. Symbols defined by
    the user never merge. With `isolate_symbols`, the pattern isolates them, and what equals a piece is not merged, so
    what equals a name is isolated in two parts. Raises `ValueError` if `tokenizers` would encode some texts with other
    ids.
    """
    ids = {text: number for number, (text, _, _) in enumerate(pieces.all)}
    if unused := [text for text in pieces.of(UNUSED) if any(True for _ in _halves(text, ids))]:
        raise ValueError(f"its piece {unused[0]!r} is unused, but pieces that contain it are used")
    merges = [
        (-score, ids[left], ids[right], left, right)
        for text, score, kind in pieces.all
        if kind in (NORMAL, USER)
        for left, right in _halves(text, ids)
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]

    def build(ignore_merges: bool) -> models.BPE:
        return models.BPE(
            ids,
            pairs,
            unk_token=next(iter(pieces.of(UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=pieces.byte_fallback,
            ignore_merges=ignore_merges,
        )

    if not isolate_symbols or not pieces.symbols:
        return build(False), "", ""
    symbols = [re.escape(symbol) for symbol in sorted(pieces.symbols, key=lambda text: (-len(text), text))]
    names = [name for name in pieces.names if len(name) > 1]
    absent = sorted(pieces.absent(names))
    kept = {*absent, *pieces.symbols}
    spelled = [text for text in [*names, *pieces.of(NORMAL)] if not any(part in text for part in kept)]
    cuts = _cuts(spelled, build(False))
    if pieces.byte_fallback:
        return build(True), "|".join(_isolated([*symbols, *map(re.escape, absent)], cuts)), ""
    return build(True), "|".join(_isolated(symbols, cuts)), "|".join(map(pieces.outside_symbols, absent))


def _halves(text: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs of pieces that form the text."""
    for cut in range(1, len(text)):
        if text[:cut] in ids and text[cut:] in ids:
            yield text[:cut], text[cut:]


def _cuts(texts: Iterable[str], model: models.BPE) -> list[tuple[str, str]]:
    """Two parts of each text that has several tokens; the parts have the same tokens. Raises `ValueError` if none."""
    tokens = {text: [token.value for token in model.tokenize(text)] for text in texts}
    several = {text: values for text, values in tokens.items() if values != [text]}
    cuts = []
    for text, values in several.items():
        parts = [("".join(values[:place]), "".join(values[place:])) for place in range(1, len(values))]
        safe = [pair for pair in parts if "".join(pair) == text and not several.keys() & set(pair)]
        if not safe:
            raise ValueError(f"a text could spell the piece {text!r}")
        cuts.append(safe[0])
    return cuts


def _isolated(patterns: list[str], cuts: Iterable[tuple[str, str]]) -> list[str]:
    """The patterns, and one of the first part of a text between two that match: at the end of the last match."""
    end = "|".join([r"\z", *patterns])
    ways = "|".join(f"{re.escape(first)}(?={re.escape(rest)}(?:{end}))" for first, rest in cuts)
    return [*patterns, rf"\G(?:{ways})"] if ways else patterns


# The unknown, begin and end tokens, the bytes, and the prefix space of every text.
MIN_VOCABULARY = 3 + 256 + 1

# Kinds of sentencepiece models.
_UNIGRAM, _BPE = 1, 2

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
    texts: Iterable[str], vocab_size: int, model_type: str, input_sentence_size: int, special_tokens: Sequence[str] = ()
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
    lines.reverse()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(lines.pop() for _ in range(len(lines))),  # the library makes its own copies
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


def _explain(error: RuntimeError, vocab_size: int) -> UserError:
    """Translate an error of sentencepiece, whose messages refer to its source files and flags."""
    text = str(error)
    if limit := re.search(r"Vocabulary size too high .* value <= (\d+)", text):
        return UserError(f"vocab_size {vocab_size}: too large for this text: at most {limit[1]} pieces")
    if limit := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return UserError(
            f"vocab_size {vocab_size}: too small for this text: its characters and the bytes require {limit[1]}"
        )
    return UserError(f"sentencepiece training failed: {text}")


def convert_sentencepiece(content: bytes, name: str) -> tuple[Tokenizer, str | None, str | None]:
    """Convert the content of a `.model` file; returns the tokenizer and its end and begin tokens, if any.

    `name` is used in errors.
    """
    from sentencepiece import sentencepiece_model_pb2

    refuse_pointer(content, f"tokenizer {name!r}")
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # defined at import
    try:
        proto.ParseFromString(content)
    except Exception as error:  # the error class of protobuf has no stable import path
        raise UserError(f"tokenizer {name!r}: not a sentencepiece model: {error}") from None
    spec, normalization = proto.trainer_spec, proto.normalizer_spec
    pieces = Pieces(tuple((piece.piece, piece.score, piece.type) for piece in proto.pieces), spec.byte_fallback)
    if not pieces.all or spec.model_type not in (_UNIGRAM, _BPE):
        raise UserError(f"tokenizer {name!r}: not a sentencepiece model of kind bpe or unigram")
    # tokenizers looks for added tokens as they are normalized, where a space at the ends would be added or removed
    changes_ends = normalization.add_dummy_prefix or normalization.remove_extra_whitespaces
    try:
        if proto.denormalizer_spec.precompiled_charsmap:
            raise ValueError("it replaces characters when it decodes (denormalization)")
        steps = build_normalizers(normalization, spec.treat_whitespace_as_suffix, pieces.symbols)
        model: models.Model
        if spec.model_type == _UNIGRAM:
            model, isolated, absent = build_unigram(pieces, spec.unk_id)
        else:
            model, isolated, absent = build_bpe(pieces, isolate_symbols=changes_ends)
    except ValueError as error:
        raise UserError(
            f"tokenizer {name!r}: {error}, which the tokenizers library cannot represent exactly; train another model, "
            "or set data.tokenizer to a folder with a tokenizer.json"
        ) from None
    if absent:  # an unknown character for others; all are equal
        steps.append(normalizers.Replace(Regex(absent), pieces.unknown_letter))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(steps)
    if isolated:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(isolated), "isolated")
    tokenizer.decoder = decoders.Sequence(_decoders(normalization, SPACE in pieces.single))
    tokenizer.add_special_tokens([piece for piece, _, kind in pieces.all if kind == CONTROL])
    if spec.model_type == _BPE and not changes_ends:
        tokenizer.add_tokens(sorted(pieces.symbols))
    ends = [pieces.all[number][0] if 0 <= number < len(pieces.all) else None for number in (spec.eos_id, spec.bos_id)]
    return tokenizer, ends[0], ends[1]


def _decoders(normalization: Any, has_space: bool) -> list[decoders.Decoder]:
    """Decoders, to be applied in order. They remove the added space, or one from each of the first tokens."""
    if normalization.remove_extra_whitespaces and has_space:  # no token has " ": it marks where a token starts
        started = decoders.Replace(Regex(rf"\A{SPACE}"), " ")
        first = decoders.Replace(Regex(r"\A +"), "")
        return [started, decoders.ByteFallback(), decoders.Fuse(), first, decoders.Replace(SPACE, " ")]
    prefix = [decoders.Strip(" ", 1, 0)] if normalization.add_dummy_prefix else []
    return [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *prefix]
