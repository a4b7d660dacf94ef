"""Parameters as the tensors of a Hugging Face model, all in memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lmtrain.hf.key_map import Table, build_pieces, take
from lmtrain.models.params import flatten


def to_hf(table: Table, params: Mapping[str, Any], num_layers: int, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors of the table, by name."""
    flat = {path: np.asarray(array) for path, array in flatten(params).items()}
    pieces = build_pieces(table, {path: array.shape for path, array in flat.items()}, num_layers, vocab_size)

    def get(path: str, layer: int | None) -> np.ndarray:
        return flat[path] if layer is None else flat[path][layer]

    return {piece.name: take(piece, get, vocab_size) for piece in pieces}
