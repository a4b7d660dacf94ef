"""The layers of a model that LoRA can train: linear layers, which can have an adapter, and the embedding tables."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmtrain.hf.key_map import Row, Table, Zeros, cut_rows, joined_rows
from lmtrain.runtime.errors import UserError, suggest_name

ALL_LINEAR = "all-linear"
_KERNEL, _WEIGHT = "/kernel", ".weight"
_BLOCKS = "blocks/"
_MIXTURE = f"{_BLOCKS}moe/"

# Names of an adapter's arrays.
A, B = "lora_a", "lora_b"

# Names in `modules_to_save` for every family; PEFT's users know them from Llama.
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A linear layer: its path here, its name in Hugging Face (with `{layer}` if it is stacked), and its sizes.

    A layer of theirs can be several of ours, `parts`, which share an adapter at `path`: the outputs of each are `sizes`
    rows in every one of the `groups` of their matrix.
    `layers` are the numbers of the blocks that have it, None for a layer that is not in the stack of blocks.
    `is_conv1d`: theirs stores [in, out]. `pairs`: the order of outputs, as in `Row`.
    """

    path: str
    module: str
    inputs: int
    outputs: int
    layers: tuple[int, ...] | None
    is_conv1d: bool
    parts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    groups: int = 1
    pairs: tuple[int, int] | None = None

    @property
    def paths(self) -> list[str]:
        """The paths of our layers."""
        return list(self.parts) or [self.path]

    def of_part(self, number: int, b: Any) -> Any:
        """The adapter's B [..., out, r] of one of `paths`."""
        return cut_rows(b, self.sizes, self.groups, number, b.ndim - 2) if self.parts else b

    @property
    def modules(self) -> list[str]:
        """Its full names in Hugging Face, one for each layer."""
        return [self.module.format(layer=layer) for layer in self.layers or (0,)]


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table or a head: the path of its parameter, and the names of its modules in Hugging Face.

    A tied table has two: those of the embeddings and of the head.
    """

    path: str
    modules: tuple[str, ...]


def list_sites(table: Table, shapes: Mapping[str, Sequence[int]]) -> list[Site]:
    """All linear layers except the head, in the order of the key table. `shapes` by path.

    In a mixture these are the layers of attention: experts and routers have no adapters, and PEFT takes those of dense
    MLPs for adapters on the experts, which have the same names.
    """
    sites, without = [], names_in_mixtures(table)
    for rows in joined_rows(table):
        row = rows if isinstance(rows, Zeros) else rows[0]
        if isinstance(row, Zeros) or not row.ours.endswith(_KERNEL) or _last_name(row) in without:
            continue
        if not row.ours.startswith(_BLOCKS) and row.is_stacked:  # modules after the last block
            continue
        layers = (row.layers or tuple(range(shapes[row.ours][0]))) if row.is_stacked else None
        shape = shapes[row.ours][1:] if row.is_stacked else shapes[row.ours]
        split = 1 if row.rows is None else row.rows
        inputs, outputs = math.prod(shape[:split]), math.prod(shape[split:])
        path, module = row.ours.removesuffix(_KERNEL), row.theirs.removesuffix(_WEIGHT)
        form: dict[str, Any] = {"is_conv1d": not row.transpose, "pairs": row.pairs}
        site = Site(path=path, module=module, inputs=inputs, outputs=outputs, layers=layers, **form)
        sites.append(site if isinstance(rows, Zeros) or len(rows) == 1 else _joined(site, rows, shapes))
    return sites


def _joined(site: Site, rows: Sequence[Row], shapes: Mapping[str, Sequence[int]]) -> Site:
    """The site of several of our layers, from that of the first."""
    outputs = [math.prod(shapes[row.ours][row.stacked_dims :]) // site.inputs for row in rows]
    groups = rows[0].groups
    return replace(
        site,
        path=f"{site.path.rpartition('/')[0]}/{_last_name(rows[0])}",
        outputs=sum(outputs),
        parts=tuple(row.ours.removesuffix(_KERNEL) for row in rows),
        sizes=tuple(size // groups for size in outputs),
        groups=groups,
    )


def names_in_mixtures(table: Table) -> set[str]:
    """The last parts of the names of experts' matrices and routers, which cannot have adapters."""
    return {_last_name(row) for row in table if isinstance(row, Row) and row.ours.startswith(_MIXTURE)}


def _last_name(row: Row) -> str:
    return row.theirs.removesuffix(_WEIGHT).rpartition(".")[2]


def list_tables(table: Table) -> list[EmbeddingTable]:
    """The embeddings and the head, as one table if they are tied."""
    rows = [row for row in table if isinstance(row, Row) and row.vocab]
    modules = [row.theirs.removesuffix(_WEIGHT) for row in rows]
    if len(rows) == 1:
        return [EmbeddingTable(rows[0].ours, (modules[0], _HEAD))]
    return [EmbeddingTable(row.ours, (module,)) for row, module in zip(rows, modules, strict=True)]


def is_head_or_embedding(module: str, tables: Sequence[EmbeddingTable]) -> bool:
    """Whether a module of Hugging Face is one of the tables."""
    return any(module in table.modules for table in tables)


def choose_sites(
    wanted: str | list[str] | None, sites: Sequence[Site], in_mixtures: Collection[str] = ()
) -> list[Site]:
    """The layers that `target_modules` names, as PEFT matches them: a list of suffixes, or a regular expression.

    Raises `UserError` for a name that matches nothing, with those that exist; `in_mixtures` are names of layers that
    cannot have adapters.
    """
    setting = "lora.target_modules"
    if wanted is None or wanted == ALL_LINEAR:
        return list(sites)
    chosen: set[Site] = set()
    for name in [wanted] if isinstance(wanted, str) else wanted:
        is_named = _by_pattern(setting, name) if isinstance(wanted, str) else _by_suffix(name)
        matches = {site for site in sites if any(map(is_named, site.modules))}
        if not matches:
            if name in in_mixtures:
                raise UserError(f"{setting}: {name}: MLPs of a model with experts have no adapters; remove it")
            known = sorted({site.module.rpartition(".")[2] for site in sites})
            if wanted in known:
                raise UserError(
                    f"{setting}: {name} is a text, which is a regular expression for the full names of layers; write "
                    f"[{name}] for all layers of this name"
                )
            _refuse(setting, name, "linear layer", known)
        if not all(is_named(module) for site in matches for module in site.modules):
            raise UserError(
                f"{setting}: {name} matches some blocks only; adapters are on the same layers of all blocks"
            )
        chosen |= matches
    return [site for site in sites if site in chosen]


def check_rank(r: int, sites: Sequence[Site]) -> None:
    """Raise `UserError` if the rank of the adapters is larger than a dimension of a layer that they adapt."""
    smallest = min(sites, key=lambda site: min(site.inputs, site.outputs))
    max_rank = min(smallest.inputs, smallest.outputs)
    if r > max_rank:
        raise UserError(
            f"lora.r: {r:,} is larger than the smallest dimension of {smallest.module} "
            f"({smallest.inputs:,} x {smallest.outputs:,}); set it to {max_rank:,} at most, or leave the layer out of "
            "lora.target_modules"
        )


def choose_tables(wanted: Sequence[str], tables: Sequence[EmbeddingTable]) -> list[EmbeddingTable]:
    """The tables that `modules_to_save` names: embed_tokens, lm_head, or the family's own names.

    Raises `UserError` for another name.
    """
    names = {_EMBEDDING: tables[0], _HEAD: tables[-1]}
    names |= {module.rpartition(".")[2]: table for table in tables for module in table.modules}
    for name in wanted:
        if name not in names:
            _refuse("lora.modules_to_save", name, "embedding table", sorted(names))
    chosen = {names[name] for name in wanted}
    return [table for table in tables if table in chosen]


def _by_suffix(name: str) -> Callable[[str], bool]:
    return lambda module: module == name or module.endswith(f".{name}")


def _by_pattern(setting: str, text: str) -> Callable[[str], bool]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UserError(f"{setting}: {text}: invalid regular expression: {error}") from None
    return lambda module: pattern.fullmatch(module) is not None


def _refuse(setting: str, name: str, what: str, known: Sequence[str]) -> Any:
    near = suggest_name(name, known)
    hint = f"; did you mean {near}?" if near else ""
    raise UserError(f"{setting}: {name} matches no {what}; this model has {', '.join(known)}{hint}")
