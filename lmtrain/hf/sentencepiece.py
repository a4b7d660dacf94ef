"""Sentencepiece models as objects of the `tokenizers` library, which tokenizes in training and is exported.

Follows the model's own description: BPE or unigram, its normalisation, byte fallback, the prefix space.
"""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from lmtrain.config.errors import UserError

# Types of pieces in a sentencepiece model.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_SPACE = "▁"


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
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else [])
    )
    tokenizer.add_special_tokens([piece for piece, _, type_ in pieces if type_ == _CONTROL])
    tokenizer.add_tokens([piece for piece, _, type_ in pieces if type_ == _USER])
    spec = proto.trainer_spec
    ends = [pieces[number][0] if 0 <= number < len(pieces) else None for number in (spec.eos_id, spec.bos_id)]
    return tokenizer, ends[0], ends[1]


def _unigram(pieces: list[tuple[str, float, int]], proto: Any) -> models.Unigram:
    vocabulary = [(piece, score) for piece, score, _ in pieces]
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
