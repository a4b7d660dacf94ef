"""Adapters from PEFT: their values, and the check that they were trained on this run's base."""

from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Piece, Row, build_pieces
from lmtrain.hf.weight_files import open_weights
from lmtrain.lora.config import LoraConfig
from lmtrain.lora.model import ADAPTERS, AdaptedModel
from lmtrain.lora.peft import (
    WEIGHTS_NAME,
    adapter_rows,
    check_adapter_config,
    explain_mismatch,
    read_names,
    table_name,
)
from lmtrain.lora.sites import EmbeddingTable, list_tables
from lmtrain.models.config import ModelConfig
from lmtrain.models.params import abstract_params, shapes_by_path
from lmtrain.models.registry import hf_family
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.weights.export_folder import BaseIdentity, base_of_adapter
from lmtrain.weights.load_tensors import are_equal, load_tensors


def check_base(config: LoraConfig, base: BaseIdentity) -> None:
    """Raise `UserError` if the adapter of `initialize_from` was trained on another base; log what cannot be checked."""
    ref = config.initialize_from
    assert ref is not None
    trained_on = base_of_adapter(ref)
    if trained_on is None:
        log.warning(f"lora.initialize_from: {ref} does not record its base model, so that it may be of another one")
    elif trained_on.dtype != base.dtype:
        log.warning(
            f"lora.initialize_from: {ref} was trained on a base in {trained_on.dtype}, and this run's is in "
            f"{base.dtype}, so that it is unknown whether they are the same; lora.base_dtype sets it"
        )
    elif trained_on.fingerprint != base.fingerprint:
        message = (
            f"lora.initialize_from: {ref} was trained on another base model (fingerprint "
            f"{trained_on.fingerprint[:12]}; this run's has {base.fingerprint[:12]})"
        )
        if not config.allow_other_base:
            raise UserError(f"{message}; use its base model, or set lora.allow_other_base: true")
        log.warning(message)


def load_peft_adapter(config: RunConfig, model: AdaptedModel, layout: Layout, ref: str) -> Any:
    """The adapters in the folder or repository `ref`, on their devices, as in `load_tensors`.

    Raises `UserError` for adapters that do not fit the run.
    """
    assert config.lora is not None
    check_adapter_config(config.lora)
    where = f"lora.initialize_from: {ref}"
    weights = open_weights(ref, WEIGHTS_NAME)
    names = read_names(list(weights.shapes))
    pieces = {piece.name: piece for piece in build_adapter_pieces(config.model, model)}
    for table in trained_tables(config.model, model):  # a file may have a tied table under one of its names, or both
        *others, last = map(table_name, table.modules)
        kept = next((name for name in (last, *others) if name in names), last)
        for name in {last, *others} - {kept}:
            del pieces[name]
            if name in names:
                names.remove(name)
                if not are_equal(where, weights, name, kept, layout):
                    raise UserError(f"{where}: {name} differs from the embeddings, but the model ties them")
    missing, unexpected = sorted(pieces.keys() - names), sorted(names - pieces.keys())
    if missing or unexpected:
        tables = list_tables(hf_family(config.model.type).table(config.model))
        raise explain_mismatch(where, missing, unexpected, tables)
    for name, piece in pieces.items():
        _check_shape(where, piece, weights.shapes[name])
    boxed = abstract_params(model)[ADAPTERS]
    dtype = config.trainer.precision.params
    stored_names = {name: name for name in pieces}
    return load_tensors(where, weights, stored_names, pieces.values(), boxed, model.vocab_size, layout, dtype)


def build_adapter_pieces(config: ModelConfig, model: AdaptedModel) -> list[Piece]:
    """The tensors of the adapters in PEFT's format."""
    rows = adapter_rows(model.sites, trained_tables(config, model))
    shapes = shapes_by_path(abstract_params(model)[ADAPTERS])
    return build_pieces(rows, shapes, config.num_layers, model.vocab_size)


def trained_tables(config: ModelConfig, model: AdaptedModel) -> list[EmbeddingTable]:
    """The tables that are trained in full."""
    return [table for table in list_tables(hf_family(config.type).table(config)) if table.path in model.in_full]


def _check_shape(where: str, piece: Piece, stored: tuple[int, ...]) -> None:
    expected = piece.shape
    assert isinstance(piece.row, Row)
    if stored[1:] != expected[1:] or (not piece.row.vocab and stored != expected):
        raise UserError(f"{where}: {piece.name} is {list(stored)}, expected {list(expected)}")
    if stored[0] < expected[0]:
        raise UserError(
            f"{where}: {piece.name} has {stored[0]:,} rows, but the tokenizer has {expected[0]:,} tokens; set "
            "data.tokenizer to that of the adapter"
        )
    if stored[0] > expected[0]:
        log.info(f"{where}: {piece.name}: the first {expected[0]:,} of {stored[0]:,} rows are used")
