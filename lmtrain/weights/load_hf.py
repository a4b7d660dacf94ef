"""Parameters from the weights of a Hugging Face model, or of an adapter in PEFT's format."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.hf.key_map import Piece, build_pieces, resize_vocab
from lmtrain.hf.weight_files import Weights, open_weights
from lmtrain.lora.config import LoraConfig
from lmtrain.lora.model import ADAPTERS, AdaptedModel
from lmtrain.lora.peft import WEIGHTS_NAME, adapter_rows, check_adapter_config, explain_mismatch, read_names, table_name
from lmtrain.lora.sites import EmbeddingTable, list_tables
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, flatten, shapes_by_path, unflatten
from lmtrain.models.registry import hf_family
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import parameter_shardings
from lmtrain.weights.export_folder import BaseIdentity, base_of_adapter

# Stored tensors as parameters on their devices, one tensor at a time, on any devices and processes.
#
# The host holds a few tensors at a time. With several processes, each reads its share of the rows of every large
# tensor, and the devices exchange the rows that they need.

# What is kept of a complete parameter at a path, by path.
Keep = Callable[[str, jax.Array], dict[str, jax.Array]]

# Minimum number of elements of a tensor whose reading processes share.
_MIN_SHARED = 2**16


def load_tensors(
    where: str,
    weights: Weights,
    names: Mapping[str, str],
    pieces: Iterable[Piece],
    boxed: Any,
    vocab_size: int,
    layout: Layout,
    dtype: str,
    keep: Keep | None = None,
) -> Any:
    """Parameters like the abstract ones in `boxed`, in `dtype` unless they are exact, with the values of `pieces`.

    `names` are the names in the file by those of the pieces. Embeddings are resized to `vocab_size` (see
    `resize_vocab`); only the first learned positions are used. `where` begins the errors: `UserError` for tensors that
    have no floating-point numbers, or are not zero although the model lacks them. `keep(path, array)` returns the
    arrays by path that are kept of a complete one; then one is completed before the next is read.
    """
    if keep is not None:
        pieces = sorted(pieces, key=lambda piece: [row.ours for row in piece.rows])
    pieces = list(pieces)
    left = Counter(row.ours for piece in pieces for row in piece.rows)
    abstract, shardings = flatten(nn.meta.unbox(boxed)), flatten(parameter_shardings(layout, boxed))

    def dtype_of(piece: Piece) -> str:
        return "float32" if piece.is_exact else dtype

    def reader(piece: Piece) -> Callable[[int, tuple[int, ...], NamedSharding], jax.Array]:
        """(number of the row, shape, sharding) -> our array of one of the piece's rows."""
        name, own = names[piece.name], dtype_of(piece)
        stored = weights.shapes[name]
        if jax.process_count() > 1 and len(stored) > 1 and math.prod(stored) >= _MIN_SHARED:
            split = split_rows(functools.partial(_read_rows, where, weights, name), stored, layout)
            like = replace(piece, name="", index=())
            return lambda *part: jax.block_until_ready(_converting(like, *part, stored[0], vocab_size, own)(split))
        whole = _floats(where, name, weights.read(name))

        def load(number: int, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
            array = _to_ours(piece, number, whole, shape, vocab_size).astype(own, copy=False)
            return jax.make_array_from_callback(shape, sharding, lambda index: np.ascontiguousarray(array[index]))

        return load

    flat: dict[str, jax.Array] = {}
    for piece in pieces:
        if not piece.rows:
            if np.any(weights.read(names[piece.name])):
                raise UserError(f"{where}: {piece.name} is not zero, but model.use_bias is false")
            continue
        load = reader(piece)
        for number, row in enumerate(piece.rows):
            shape, sharding = abstract[row.ours].shape, shardings[row.ours]
            if not piece.index:
                flat[row.ours] = load(number, shape, sharding)
            else:
                if row.ours not in flat:
                    flat[row.ours] = jnp.zeros(shape, dtype_of(piece), device=sharding)
                dims = len(piece.index)
                array = load(number, shape[dims:], NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[dims:])))
                flat[row.ours] = _with_part(sharding)(flat[row.ours], array, piece.index)
            # wait, or the host runs ahead of the devices and holds one more tensor for each piece that it is ahead
            jax.block_until_ready(flat[row.ours])
            left[row.ours] -= 1
            if keep is not None and not left[row.ours]:
                flat |= keep(row.ours, flat.pop(row.ours))
    return unflatten(flat)


def are_equal(where: str, weights: Weights, name: str, other: str, layout: Layout) -> bool:
    """Whether two tensors are equal. With several processes, each reads its share of the rows."""
    if (shape := weights.shapes[name]) != weights.shapes[other]:
        return False
    if jax.process_count() == 1:
        return np.array_equal(weights.read(name), weights.read(other))
    read = (functools.partial(_read_rows, where, weights, stored) for stored in (name, other))
    parts = [split_rows(read_rows, shape, layout) for read_rows in read]
    return bool(jax.jit(jnp.array_equal, out_shardings=layout.replicated)(*parts))


@functools.cache
def _with_part(sharding: NamedSharding) -> Any:
    """`(stacked, array, index) -> stacked`, compiled once for all stacked parameters of the same shape and layout."""

    def update(stacked: jax.Array, array: jax.Array, index: tuple[int, ...]) -> jax.Array:
        return jax.lax.dynamic_update_slice(
            stacked, jnp.expand_dims(array, tuple(range(len(index)))), (*index, *[0] * array.ndim)
        )

    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _converting(
    piece: Piece,
    number: int,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    rows: int,
    vocab_size: int,
    dtype: str,
) -> Any:
    """`split rows -> our array`, compiled once for all tensors of the same shape and layout."""
    return jax.jit(
        lambda split: _to_ours(piece, number, split[:rows], shape, vocab_size, jnp).astype(dtype),
        out_shardings=sharding,
    )


def _to_ours(piece: Piece, number: int, stored: Any, shape: tuple[int, ...], vocab_size: int, numpy: Any = np) -> Any:
    """A row of a stored tensor in our layout, converted with numpy, or on the devices with `jax.numpy`."""
    row, array = piece.rows[number], piece.part_of(number, stored)
    if row.vocab:
        return resize_vocab(array, vocab_size, shape[0], numpy)
    return row.to_ours(array[: shape[0]] if row.cut else array, shape)


def split_rows(read: Callable[[int, int], np.ndarray], shape: tuple[int, ...], layout: Layout) -> jax.Array:
    """A tensor whose rows are split over all devices, padded to a multiple of their number.

    Each process reads the rows of its own devices with `read(first, last)`.
    """
    rows, size = shape[0], layout.mesh.size
    padded = (-(-rows // size) * size, *shape[1:])

    def part(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(padded[0])
        array = read(min(first, rows), min(last, rows))
        return np.pad(array, ((0, last - first - len(array)), *((0, 0) for _ in shape[1:])))

    return jax.make_array_from_callback(padded, NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names)), part)


def _read_rows(where: str, weights: Weights, name: str, first: int, last: int) -> np.ndarray:
    rows = _floats(where, name, weights.read_rows(name, first, last))
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows  # the devices have no float64


def _floats(where: str, name: str, array: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise UserError(
            f"{where}: {name} holds {array.dtype}, not floating-point numbers; quantized weights are not supported"
        )
    return array


_MAX_LISTED = 5
_HEAD = "lm_head.weight"


def load_hf_params(
    ref: str,
    config: ModelConfig,
    model: LanguageModel,
    layout: Layout,
    dtype: str,
    trained: Collection[str] | None = None,
    keep: Keep | None = None,
) -> Any:
    """The parameters of `model` with the weights of `ref`, in `dtype`, on their devices, as in `load_tensors`.

    `trained` are the paths of the parameters that will be trained, None for all. Raises `UserError` for tensors that
    are missing, unexpected or of another shape, and for new rows in a table that is not trained.
    """
    weights = open_weights(ref)
    pieces = build_hf_pieces(config, model)
    names = _match(ref, weights, pieces, config, layout)
    _log_resizing(ref, weights, names, pieces, model.vocab_size, trained)
    return load_tensors(ref, weights, names, pieces, abstract_params(model), model.vocab_size, layout, dtype, keep)


def build_hf_pieces(config: ModelConfig, model: LanguageModel) -> list[Piece]:
    """The tensors that a model of this config has in the Hugging Face format."""
    shapes = shapes_by_path(abstract_params(model))
    return build_pieces(hf_family(config.type).table(config), shapes, config.num_layers, model.vocab_size)


def _match(ref: str, weights: Weights, pieces: Sequence[Piece], config: ModelConfig, layout: Layout) -> dict[str, str]:
    """The stored name of each piece. Raises `UserError` unless they match one to one, with equal shapes."""
    canonical = hf_family(config.type).canonical
    stored = {known: name for name in weights.shapes if (known := canonical(name, config)) is not None}
    if left_out := sorted(weights.shapes.keys() - stored.values()):
        log.info(f"{ref}: {len(left_out)} tensors are left out, such as {left_out[0]}")
    expected = {piece.name: piece for piece in pieces}
    for name, piece in expected.items():
        if piece.also in stored and name not in stored:
            stored[name] = stored.pop(piece.also)
    if _HEAD in stored and _HEAD not in expected:
        embedding = next(name for name, piece in expected.items() if piece.is_vocab)
        if embedding in stored and not are_equal(ref, weights, stored[_HEAD], stored[embedding], layout):
            raise UserError(f"{ref}: {_HEAD} differs from {embedding}, but config.json ties them")
        del stored[_HEAD]
    ahead = [name for name, piece in expected.items() if any(row.ours.startswith("mtp/") for row in piece.rows)]
    if of_modules := [name for name in ahead if name not in stored]:
        raise UserError(
            f"model.mtp: {ref} does not have {counted(len(of_modules), 'tensor')} of its modules, such as "
            f"{of_modules[0]}; remove it, or set another num_modules"
        )
    problems = [f"missing {name}" for name in expected if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in expected]
    matched = {piece: weights.shapes[stored[name]] for name, piece in expected.items() if name in stored}
    for piece, theirs in matched.items():
        ours, is_cut = piece.shape, any(row.cut for row in piece.rows)
        resizable = piece.is_vocab or (is_cut and len(theirs) > 0 and theirs[0] >= ours[0])
        if theirs[1:] != ours[1:] if resizable else theirs != ours:
            problems.append(f"{piece.name} is {list(theirs)}, expected {list(ours)}")
    counts = {piece.name: sum(theirs[:1]) for piece, theirs in matched.items() if piece.is_vocab}
    if len(set(counts.values())) > 1:
        problems.append(" but ".join(f"{name} has {count:,} rows" for name, count in counts.items()))
    problems += [f"{name} has no rows" for name, count in counts.items() if not count]
    if problems:
        more = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
        raise UserError("\n  ".join([f"{ref}: its weights do not match this model", *problems[:_MAX_LISTED], *more]))
    return stored


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
        if theirs == piece.shape or not piece.rows:
            continue
        if theirs[0] > piece.shape[0]:
            what = f"the first {piece.shape[0]:,} of {theirs[0]:,} rows are used"
        elif trained is not None and piece.rows[0].ours not in trained:
            raise UserError(
                f"{ref}: {piece.name} has {theirs[0]:,} rows for {vocab_size:,} tokens, and the new rows would stay "
                "untrained; set lora.modules_to_save: [embed_tokens, lm_head]"
            )
        else:
            what = f"{vocab_size - theirs[0]:,} rows are added to {theirs[0]:,}, each the mean of the existing rows"
        log.info(f"{ref}: {piece.name}: {what}, to fit " + ("the tokenizer" if piece.is_vocab else "model.seq_len"))


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
    if stored[1:] != expected[1:] or (not piece.is_vocab and stored != expected):
        raise UserError(f"{where}: {piece.name} is {list(stored)}, expected {list(expected)}")
    if stored[0] < expected[0]:
        raise UserError(
            f"{where}: {piece.name} has {stored[0]:,} rows, but the tokenizer has {expected[0]:,} tokens; set "
            "data.tokenizer to that of the adapter"
        )
    if stored[0] > expected[0]:
        log.info(f"{where}: {piece.name}: the first {expected[0]:,} of {stored[0]:,} rows are used")
