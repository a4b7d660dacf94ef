"""Adapters from and for PEFT: their values, from its files and for its files, and merged into the base."""

from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.hf.export import Export, Origin
from lmtrain.hf.key_map import Piece, Row, flatten, plan_pieces, resize_vocab, take, unflatten
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.hf.weights import open_weights
from lmtrain.lora.adapters import adapted_layers, merge_layer, trained_in_full
from lmtrain.lora.model import ADAPTERS, BASE, AdaptedModel, parameter_shapes
from lmtrain.lora.peft import (
    WEIGHTS_NAME,
    adapter_rows,
    check_adapter_config,
    explain_mismatch,
    read_names,
    table_name,
    to_adapter_config,
)
from lmtrain.lora.sites import A, B, EmbeddingTable, list_sites, list_tables
from lmtrain.models.config import ModelConfig
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import hf_family
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.train.program.program import Program
from lmtrain.train.start.hf_params import gatherers


def plan_adapter_export(
    config: RunConfig,
    model: AdaptedModel,
    tokenizer: Tokenizer,
    dtype: str,
    origin: Origin | None,
    base_model: str | None,
) -> Export:
    """An export of adapters without their values."""
    assert config.lora is not None
    table = hf_family(config.model.type).table(config.model)
    sites = list_sites(table, parameter_shapes(model.inner))
    values = to_adapter_config(config.lora, model.sites, sites, _tables(config.model, model), base_model)
    pieces = _pieces(config.model, model)
    return Export(pieces, values, {}, tokenizer, dtype, origin, config.model.seq_len, is_adapter=True)


def load_peft_adapter(program: Program, ref: str) -> Any:
    """The adapters in the folder or repository `ref`, on their devices.

    Raises `UserError` for adapters that do not fit the run.
    """
    config, model = program.config, program.model
    assert isinstance(model, AdaptedModel)
    assert config.lora is not None
    check_adapter_config(config.lora)
    where = f"lora.initialize_from: {ref}"
    weights = open_weights(ref, WEIGHTS_NAME)
    names = read_names(list(weights.shapes))
    pieces = {piece.name: piece for piece in _pieces(config.model, model)}
    for table in _tables(config.model, model):  # a file may have a tied table under one of its names, or under both
        absent = [name for name in map(table_name, table.modules) if name not in names]
        for name in absent[: len(table.modules) - 1]:
            del pieces[name]
    missing, unexpected = sorted(pieces.keys() - names), sorted(names - pieces.keys())
    if missing or unexpected:
        tables = list_tables(hf_family(config.model.type).table(config.model))
        raise explain_mismatch(where, missing, unexpected, tables)
    flat: dict[str, np.ndarray] = {}
    abstract, shardings = flatten(program.abstract.params), flatten(program.shardings.params)
    for name, piece in pieces.items():
        assert isinstance(piece.row, Row)
        stored = weights.read(name).astype(np.float32)
        if stored.shape[1:] != piece.shape[1:] or (not piece.row.vocab and stored.shape != piece.shape):
            raise UserError(f"{where}: {name} is {list(stored.shape)}, expected {list(piece.shape)}")
        if stored.shape[0] < piece.shape[0]:
            raise UserError(
                f"{where}: {name} has {stored.shape[0]:,} rows, but the tokenizer has {piece.shape[0]:,} tokens; set "
                "data.tokenizer to that of the adapter"
            )
        if stored.shape[0] > piece.shape[0]:
            log.info(f"{where}: {name}: the first {piece.shape[0]:,} of {stored.shape[0]:,} rows are used")
        path, shape = piece.row.ours, abstract[piece.row.ours].shape
        if piece.layer is not None:
            flat.setdefault(path, np.zeros(shape, np.float32))[piece.layer] = stored
            continue
        array = resize_vocab(stored, model.vocab_size, shape[0]) if piece.row.vocab else stored
        if path in flat and not np.array_equal(flat[path], array):
            raise UserError(f"{where}: {name} differs from the embeddings, but the model ties them")
        flat[path] = array
    placed = {}
    for path, array in flat.items():
        array = array.astype(abstract[path].dtype)
        placed[path] = jax.make_array_from_callback(array.shape, shardings[path], lambda index, all=array: all[index])
    return unflatten(placed)


def gather_merged(params: Any, model: AdaptedModel, pieces: Sequence[Piece], layout: Layout) -> Iterator[np.ndarray]:
    """The tensors of the base with the adapters merged in float32; all processes have to iterate over all of them."""
    base, adapters = flatten(params[BASE]), flatten(params[ADAPTERS])
    adapted = {f"{path}/kernel": path for path in adapted_layers(adapters)}
    full = set(trained_in_full(adapters))
    whole, of_layer = gatherers(layout.replicated)

    def read(array: jax.Array, layer: int | None) -> np.ndarray:
        return np.asarray(whole(array) if layer is None else of_layer(array, layer))

    def get(path: str, layer: int | None) -> np.ndarray:
        values = read(adapters[path] if path in full else base[path], layer)
        if path not in adapted:
            return values
        a, b = (read(adapters[f"{adapted[path]}/{name}"], layer) for name in (A, B))
        return merge_layer(values, a, b, model.scale)

    return (take(piece, get, model.vocab_size) for piece in pieces)


def _pieces(config: ModelConfig, model: AdaptedModel) -> list[Piece]:
    """The tensors of the adapters in PEFT's format."""
    shapes = {path: leaf.shape for path, leaf in flatten(nn.meta.unbox(abstract_params(model)[ADAPTERS])).items()}
    rows = adapter_rows(model.sites, _tables(config, model))
    return plan_pieces(rows, shapes, config.num_layers, model.vocab_size)


def _tables(config: ModelConfig, model: AdaptedModel) -> list[EmbeddingTable]:
    """The tables that are trained in full."""
    return [table for table in list_tables(hf_family(config.type).table(config)) if table.path in model.in_full]
