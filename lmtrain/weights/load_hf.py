"""Parameters from the weights of a Hugging Face model."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Piece, Row, build_pieces
from lmtrain.hf.weight_files import Weights, open_weights
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, shapes_by_path
from lmtrain.models.registry import hf_family
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.weights.load_tensors import are_equal, load_tensors

_MAX_LISTED = 5
_HEAD = "lm_head.weight"


def load_hf_params(
    ref: str,
    config: ModelConfig,
    model: LanguageModel,
    layout: Layout,
    dtype: str,
    trained: Collection[str] | None = None,
) -> Any:
    """The parameters of `model` with the weights of `ref`, in `dtype`, on their devices, as in `load_tensors`.

    `trained` are the paths of the parameters that will be trained, None for all. Raises `UserError` for tensors that
    are missing, unexpected or of another shape, and for new rows in a table that is not trained.
    """
    weights = open_weights(ref)
    pieces = build_hf_pieces(config, model)
    names = _match(ref, weights, pieces, config, layout)
    _log_resizing(ref, weights, names, pieces, model.vocab_size, trained)
    return load_tensors(ref, weights, names, pieces, abstract_params(model), model.vocab_size, layout, dtype)


def build_hf_pieces(config: ModelConfig, model: LanguageModel) -> list[Piece]:
    """The tensors that a model of this config has in the Hugging Face format."""
    shapes = shapes_by_path(abstract_params(model))
    return build_pieces(hf_family(config.type).table(config), shapes, config.num_layers, model.vocab_size)


def _match(ref: str, weights: Weights, pieces: Sequence[Piece], config: ModelConfig, layout: Layout) -> dict[str, str]:
    """The stored name of each piece. Raises `UserError` unless they match one to one, with equal shapes."""
    canonical = hf_family(config.type).canonical
    stored = {known: name for name in weights.shapes if (known := canonical(name)) is not None}
    expected = {piece.name: piece for piece in pieces}
    if _HEAD in stored and _HEAD not in expected:
        embedding = next(name for name, piece in expected.items() if _is_vocab(piece))
        if embedding in stored and not are_equal(ref, weights, stored[_HEAD], stored[embedding], layout):
            raise UserError(f"{ref}: {_HEAD} differs from {embedding}, but config.json ties them")
        del stored[_HEAD]
    problems = [f"missing {name}" for name in expected if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in expected]
    matched = {piece: weights.shapes[stored[name]] for name, piece in expected.items() if name in stored}
    for piece, theirs in matched.items():
        row, ours = piece.row, piece.shape
        resizable = isinstance(row, Row) and (row.vocab or (row.cut and len(theirs) > 0 and theirs[0] >= ours[0]))
        if theirs[1:] != ours[1:] if resizable else theirs != ours:
            problems.append(f"{piece.name} is {list(theirs)}, expected {list(ours)}")
    counts = {piece.name: sum(theirs[:1]) for piece, theirs in matched.items() if _is_vocab(piece)}
    if len(set(counts.values())) > 1:
        problems.append(" but ".join(f"{name} has {count:,} rows" for name, count in counts.items()))
    problems += [f"{name} has no rows" for name, count in counts.items() if not count]
    if problems:
        more = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
        raise UserError("\n  ".join([f"{ref}: its weights do not match this model", *problems[:_MAX_LISTED], *more]))
    return stored


def _is_vocab(piece: Piece) -> bool:
    return isinstance(piece.row, Row) and piece.row.vocab


def _log_resizing(
    ref: str,
    weights: Weights,
    names: Mapping[str, str],
    pieces: Sequence[Piece],
    vocab_size: int,
    trained: Collection[str] | None,
) -> None:
    for piece in pieces:
        theirs = weights.shapes[names[piece.name]]
        if theirs == piece.shape or not isinstance(piece.row, Row):
            continue
        if theirs[0] > piece.shape[0]:
            what = f"the first {piece.shape[0]:,} of {theirs[0]:,} rows are used"
        elif trained is not None and piece.row.ours not in trained:
            raise UserError(
                f"{ref}: {piece.name} has {theirs[0]:,} rows for {vocab_size:,} tokens, and the new rows would stay "
                "untrained; set lora.modules_to_save: [embed_tokens, lm_head]"
            )
        else:
            what = f"{vocab_size - theirs[0]:,} rows are added to {theirs[0]:,}, each the mean of the existing rows"
        log.info(f"{ref}: {piece.name}: {what}, to fit " + ("the tokenizer" if piece.row.vocab else "model.seq_len"))
