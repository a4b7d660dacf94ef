"""Writing an export for `transformers`: sharded weights, config and tokenizer, to a folder or a URL.

Files are written under a temporary name, read back and compared, and then renamed.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from lmtrain.hf.chat_template import ChatTemplate, end_of_turn, tokenizer_contents
from lmtrain.hf.key_map import Piece
from lmtrain.hf.safetensors_file import header_of, read_header, read_tensor, write_tensor
from lmtrain.hf.special_tokens import SETTINGS_FILE
from lmtrain.hf.tokenizer import MODEL_FILE, Tokenizer, to_json, with_model_file
from lmtrain.lora.model import AdaptedModel
from lmtrain.lora.peft import to_adapter_config
from lmtrain.lora.sites import list_sites
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, shapes_by_path
from lmtrain.models.registry import hf_family
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.remote import open_fs, remote_errors
from lmtrain.runtime.storage import delete_folder, is_url, join, read_reliably, write_bytes, write_json
from lmtrain.weights.compare_export import different_ids
from lmtrain.weights.export_folder import (
    ADAPTER_CONFIG,
    ADAPTER_MARKS,
    MODEL_CONFIG,
    ModelOrigin,
    check_output,
    is_written,
    marks_of,
    put_in_place,
    remove_interrupted,
    temporary_folder,
)
from lmtrain.weights.load_hf import build_adapter_pieces, build_hf_pieces, trained_tables
from lmtrain.weights.model_card import CARD, ModelCard

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
# The model_max_length that transformers writes for an unknown length.
_UNKNOWN_LENGTH = int(1e30)
# A class for exports whose type of model has another one in transformers.
_OWN_CLASS = b'''"""The general class, so that transformers uses the rules of tokenizer.json."""

from transformers import PreTrainedTokenizerFast


class ExportedTokenizer(PreTrainedTokenizerFast):
    pass
'''


def write_export(output: str, export: "Export", tensors: Iterable[np.ndarray], shard_bytes: int = _SHARD_BYTES) -> None:
    """Write an export to the folder or URL `output`. `tensors` yields the values of the pieces, in their order.

    Holds one tensor in memory at a time. Raises `UserError` if `output` holds something other than an export.
    """
    check_output(output, export.extra_files)
    # a symbolic link to a folder is kept
    output = output.rstrip("/") if is_url(output) else os.path.realpath(os.path.expanduser(output))
    remove_interrupted(output)
    temporary = temporary_folder(output)
    if not is_url(temporary):
        os.makedirs(temporary)
    try:
        names = _write_weights(temporary, export, iter(tensors), shard_bytes)
        for name, values in _settings(export).items():
            write_json(join(temporary, name), values)
            names.append(name)
        others = {**export.extra_files, **_tokenizer_files(export)}
        if export.card is not None:
            others[CARD] = export.card
        for name, content in others.items():
            write_bytes(join(temporary, name), content)
        names = [*others, *names]
        assert all(map(is_written, names)), names  # else the next export would not replace this one
        put_in_place(temporary, output, names, marks_of(export.origin))
    finally:
        delete_folder(temporary)


def _settings(export: "Export") -> dict[str, Mapping[str, Any]]:
    """Contents of the JSON files with settings, by name."""
    if export.is_adapter:
        return {ADAPTER_MARKS: marks_of(export.origin, with_base=True), ADAPTER_CONFIG: export.config}
    # transformers 5 reads `dtype`, version 4 reads `torch_dtype`
    dtypes = {"dtype": export.dtype, "torch_dtype": export.dtype}
    config = {**export.config, **dtypes, **marks_of(export.origin)}
    return {MODEL_CONFIG: config, "generation_config.json": _generation(export)}


def _generation(export: "Export") -> dict[str, Any]:
    """Settings of generation: those of the initial model, and what ends generation of this one."""
    eos, bos = _end_ids(export), export.tokenizer.bos_id
    pad = next(iter(_token_ids(export, "pad_token_id")), None)
    bos = next(iter(_token_ids(export, "bos_token_id")), None) if bos is None else bos
    ours = {"eos_token_id": eos, "bos_token_id": bos, "pad_token_id": pad}
    generation = {name: value for name, value in {**export.generation, **ours}.items() if value is not None}
    if export.max_length is not None:
        # Transformers generates past the last position otherwise, and fails. Not for other models: next to it every
        # `generate(max_new_tokens=...)` logs a warning.
        generation["max_length"] = export.max_length
    return generation


def _end_ids(export: "Export") -> int | list[int] | None:
    """The tokens that end generation: after training on conversations the one that ends a reply, the EOS token, and
    those of the initial model."""
    eos, end = export.tokenizer.eos_id, None
    if export.chat_template is not None:
        try:
            end = end_of_turn(export.chat_template, export.tokenizer)
        except UserError as error:
            log.warning(f"generation_config.json: the token that ends a reply is unknown: {error}")
    ends = [end, eos, *_token_ids(export, "eos_token_id")]
    ids = list(dict.fromkeys(number for number in ends if number is not None))
    return ids[0] if len(ids) == 1 else ids or None


def _token_ids(export: "Export", name: str) -> list[int]:
    """The ids that the initial model's settings of generation have under `name`; not those without a row here."""
    value = export.generation.get(name)
    values = value if isinstance(value, list) else [value]
    unknown = [v for v in values if v is not None and not (type(v) is int and 0 <= v < export.tokenizer.vocab_size)]
    if unknown:
        log.warning(f"generation_config.json: {name} of the initial model: {unknown[0]!r} is no token of this model")
    return [v for v in values if v is not None and v not in unknown]


def _tokenizer_files(export: "Export") -> dict[str, bytes]:
    """Files of the tokenizer's folder; none for passthrough. Next to them transformers gives the ids of training.

    Many classes of transformers write rules of their own over those of tokenizer.json. So the class is the general one
    if the folder's gives other ids; and next to a type of model that has its class whatever the settings say (Qwen2 in
    transformers 5), one that comes with the folder: it keeps transformers from the other, and is used only where remote
    code is trusted.
    """
    tokenizer = export.tokenizer
    files = tokenizer_contents(os.path.expanduser(tokenizer.path), export.chat_template)
    if not files:
        return files
    if MODEL_FILE in files:
        files = with_model_file(files, tokenizer)
    settings = json.loads(files[SETTINGS_FILE]) if SETTINGS_FILE in files else {}
    known = settings.get("model_max_length")
    is_known = isinstance(known, int | float) and known < _UNKNOWN_LENGTH
    if export.seq_len is not None and not is_known:
        settings["model_max_length"] = export.seq_len
    general = {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}
    own = {**general, "auto_map": {"AutoTokenizer": [None, "exported_tokenizer.ExportedTokenizer"]}}
    forms = [{SETTINGS_FILE: to_json(general)}, {SETTINGS_FILE: to_json(own), "exported_tokenizer.py": _OWN_CLASS}]
    if settings.get("tokenizer_class") not in (None, general["tokenizer_class"]):
        forms.insert(0, {SETTINGS_FILE: to_json(settings)})
    kind = {} if export.is_adapter else {MODEL_CONFIG: to_json({"model_type": export.config["model_type"]})}
    problems: list[str] = []
    for form in forms:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in {**files, **form, **kind}.items():
                write_bytes(join(folder, name), content)
            problem = different_ids(folder, tokenizer)
        if problem is None:
            if problems:
                log.warning(f"tokenizer_config.json of the export: another class than the tokenizer's: {problems[0]}")
            return {**files, **form}
        problems.append(problem)
    log.warning(f"the tokenizer of the export is not that of training in transformers: {problems[0]}")
    return {**files, **forms[0]}


def choose_shards(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Indices of the pieces of each file: in order, up to `max_bytes`, at least one piece per file."""
    shards: list[list[int]] = [[]]
    held = 0
    for index, size in enumerate(sizes):
        if shards[-1] and held + size > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(index)
        held += size
    return shards


def _write_weights(folder: str, export: "Export", tensors: Iterator[np.ndarray], shard_bytes: int) -> list[str]:
    """Write the weight files, and an index if there are several. Returns their names."""
    numbers = [math.prod(piece.shape) for piece in export.pieces]
    sizes = [_dtype(export, piece).itemsize * number for piece, number in zip(export.pieces, numbers, strict=True)]
    shards = [list(range(len(sizes)))] if export.is_adapter else choose_shards(sizes, shard_bytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["adapter_model.safetensors" if export.is_adapter else "model.safetensors"]
    file_of: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        pieces = [export.pieces[index] for index in shard]
        file_of |= {piece.name: name for piece in pieces}
        path, digests = join(folder, name), {}
        fs, inside = open_fs(path)
        with remote_errors(path, "written"), fs.open(inside, "wb") as file:
            file.write(header_of({piece.name: (piece.shape, _dtype(export, piece)) for piece in pieces}))
            for piece in pieces:
                tensor = next(tensors)
                assert tensor.shape == piece.shape, (piece, tensor.shape)
                tensor = np.ascontiguousarray(tensor.astype(_dtype(export, piece), copy=False))
                write_tensor(file, tensor)
                digests[piece.name] = _digest(tensor)
        _verify(path, digests)
    if len(shards) > 1:
        total = {"total_size": sum(sizes), "total_parameters": sum(numbers)}
        write_json(join(folder, _INDEX), {"metadata": total, "weight_map": file_of})
        names.append(_INDEX)
    return names


def _dtype(export: "Export", piece: Piece) -> np.dtype[Any]:
    return DTYPES["float32" if piece.is_exact else export.dtype]


def _verify(path: str, digests: Mapping[str, bytes]) -> None:
    """Read a file back and compare; a file that differs from the model must not be renamed to its final name."""
    stored = read_header(path)
    if stored.keys() != digests.keys():
        raise OSError(f"{path}: verification failed: other tensors than were written")
    for name, digest in digests.items():
        read = partial(lambda info: _digest(read_tensor(path, info)), stored[name])
        if read_reliably(path, read, digest.__eq__) != digest:
            raise OSError(f"{path}: verification failed: checksum mismatch of {name}")


def _digest(tensor: np.ndarray) -> bytes:
    return hashlib.blake2b(tensor.reshape(-1).view(np.uint8).data, digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class Export:
    """Contents of an export, except for the values of the tensors.

    `origin` is the model's run, if any. `seq_len` is the maximum length in tokens, written as `model_max_length` of
    the tokenizer unless its settings have one; `max_length` that of generation, for models that have no position after
    it. `generation` are further settings of generation. `is_adapter`: adapters in PEFT's format, whose `config` is an
    `adapter_config.json`. `chat_template` is that of the training data; None: the tokenizer's own.
    `card` is README.md; None: there is none.
    """

    pieces: Sequence[Piece]
    config: Mapping[str, Any]
    extra_files: Mapping[str, bytes]
    tokenizer: Tokenizer
    dtype: str
    origin: ModelOrigin | None = None
    seq_len: int | None = None
    max_length: int | None = None
    is_adapter: bool = False
    chat_template: ChatTemplate | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    card: bytes | None = None

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(piece.shape) for piece in self.pieces)

    def with_card(self, card: ModelCard, step: int) -> "Export":
        """This export with a README.md for the model after `step` updates."""
        base = self.config.get("base_model_name_or_path") if self.is_adapter else None
        return replace(self, card=card.page(step, self.dtype, self.num_parameters, self.is_adapter, base))


def build_export(
    config: ModelConfig, model: LanguageModel, tokenizer: Tokenizer, dtype: str, origin: ModelOrigin | None = None
) -> Export:
    """The export of a model. Raises `UserError` naming a setting that the target format cannot represent."""
    family = hf_family(config.type)
    config = family.exported_config(config) if hasattr(family, "exported_config") else config
    model = model.clone(config=config)
    hf_config = family.to_hf_config(config, model.vocab_size, tokenizer.eos_id, tokenizer.bos_id)
    extra = family.extra_files() if hasattr(family, "extra_files") else {}
    max_length = config.seq_len if family.HAS_LEARNED_POSITIONS else None
    pieces = build_hf_pieces(config, model)
    if hasattr(family, "exported"):
        pieces = [replace(piece, name=family.exported(piece.name, config)) for piece in pieces]
    return Export(
        pieces=pieces,
        config=hf_config,
        extra_files=extra,
        tokenizer=tokenizer,
        dtype=dtype,
        origin=origin,
        seq_len=config.seq_len,
        max_length=max_length,
    )


def build_adapter_export(
    config: RunConfig,
    model: AdaptedModel,
    tokenizer: Tokenizer,
    dtype: str,
    origin: ModelOrigin | None,
    base_model: str | None,
) -> Export:
    """The export of adapters. `base_model` is the Hugging Face model that they belong to, if it is one."""
    assert config.lora is not None
    sites = list_sites(hf_family(config.model.type).table(config.model), shapes_by_path(abstract_params(model.inner)))
    tables = trained_tables(config.model, model)
    values = to_adapter_config(config.lora, model.sites, sites, tables, base_model)
    pieces = build_adapter_pieces(config.model, model)
    return Export(
        pieces=pieces,
        config=values,
        extra_files={},
        tokenizer=tokenizer,
        dtype=dtype,
        origin=origin,
        seq_len=config.model.seq_len,
        is_adapter=True,
    )
