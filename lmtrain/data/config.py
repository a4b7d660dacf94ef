"""Settings of the data: text sources, tokenizer, and token cache; and the batch size of each step."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, model_validator

from lmtrain.config.section import RawText, Section, execution, identity
from lmtrain.data.formats import (
    ChatFormat,
    CompletionFormat,
    FormatConfig,
    Pack,
    PreferenceFormat,
    TextFormat,
    TokensFormat,
)
from lmtrain.runtime.errors import field_error


def demo_tokenizer(demo: str) -> str:
    """Folder of the tokenizer that the demo trains."""
    return f"{demo.rstrip('/')}/tokenizer"


class SourceConfig(Section):
    """One source of text: files, or a Hugging Face dataset."""

    train_urls: list[str] | None = identity(
        None,
        description="Training files (.jsonl .json .txt .parquet .arrow, plain or .gz .zst .bz2 .xz): paths and URLs "
        "with braces ({1..8}) and globs (*), read in this order; with format tokens also .bin, .ds and .npy, and "
        "folders of token caches",
    )
    validation_urls: list[str] | None = identity(None, description="Validation files, in the same form as train_urls")
    id: str | None = identity(None, min_length=1, description="Hugging Face dataset: a hub id or a local folder")
    name: str | None = identity(None, description="Configuration of the dataset `id`; null: its default configuration")
    stream: bool = identity(False, description="Read the dataset `id` as a stream instead of downloading it first")
    split: str = identity("train", min_length=1, description="Split of the dataset `id` to train on")
    validation_split: str | None = identity(
        None, min_length=1, description="Split of the dataset `id` to evaluate on; null: validation, if it has one"
    )
    validation_fraction: float | None = identity(
        None,
        gt=0,
        lt=1,
        description="Fraction of the training documents to hold out for validation, chosen by a hash of their text; "
        "the training files are read once more for it",
    )
    format: FormatConfig = identity(
        default_factory=TextFormat,
        description="What a record is: text, a conversation, a prompt and its completion, a pair of answers of which "
        "one is preferred, or token ids",
    )
    text_key: RawText = identity("text", description="Key (or Parquet column) of the text in each record", min_length=1)
    text_documents: Literal["line", "blank_line", "file"] = identity(
        "line",
        description="Unit of one document in a .txt file: a line, a block between blank lines, or the entire file",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceConfig":
        if self.id is not None and (self.train_urls or self.validation_urls):
            raise field_error("id", "set together with train_urls or validation_urls; remove one of them")
        if isinstance(self.format, TokensFormat) and self.text_key != "text":
            raise field_error("text_key", "has no effect on token ids; set format.input_ids_field")
        for setting in ("name", "stream", "split", "validation_split"):
            if getattr(self, setting) != type(self).model_fields[setting].default and self.id is None:
                raise field_error(setting, "applies to a Hugging Face dataset, but no id is set")
        if self.validation_fraction is not None:
            if self.validation_urls or self.validation_split is not None:
                other = "validation_urls" if self.validation_urls else "validation_split"
                raise field_error("validation_fraction", f"set together with {other}; remove one of them")
            if not self.has_train:
                raise field_error("validation_fraction", "is a part of the training text, of which there is none here")
        return self

    @property
    def has_targets(self) -> bool:
        """Whether its documents have targets, being conversations, completions or answers."""
        return isinstance(self.format, ChatFormat | CompletionFormat | PreferenceFormat)

    @property
    def has_train(self) -> bool:
        return bool(self.train_urls or self.id)


# Used in names of folders and metrics.
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Weights = dict[str, Annotated[float, Field(ge=0)]]


class DataConfig(SourceConfig):
    """Text sources, tokenizer and token cache."""

    demo: str | None = identity(
        None,
        min_length=1,
        description="Folder of the built-in demo, in place of files: the running Python's standard library and a "
        "tokenizer of 8,192 entries trained on it, made on first use",
    )
    configs: dict[SourceName, SourceConfig] | None = identity(
        None, description="Sources to mix, by name; each is cached in cache_dir/<name> and evaluated separately"
    )
    train_weights: Weights | list[tuple[StrictInt, Weights]] | None = identity(
        None,
        description="Sampling weight of each source in `configs`, on any scale; a list of [step, weights] changes them "
        "during the run; null: equal weights",
    )
    tokenizer: str = identity(
        "gpt2",
        min_length=1,
        description="Tokenizer: a folder or URL with a tokenizer.json, such a file, a vocab.json with its merges.txt, "
        "a sentencepiece .model, a hub id (owner/name@revision), byte (256 bytes, built in), or "
        "passthrough (documents are lists of token ids)",
    )
    vocab_size: int | None = identity(
        None, ge=1, le=2**32, description="Vocabulary size in tokens, for the tokenizer passthrough only"
    )
    cache_dir: str = execution(
        "cache/", min_length=1, description="Folder of the token cache; each split is stored in <cache_dir>/<split>/"
    )
    enforce_eos: bool = identity(True, description="End-of-text (EOS) token is appended to every document")
    enforce_bos: bool = identity(False, description="Begin-of-text (BOS) token is prepended to every document")
    mask_across_documents: bool = identity(
        True, description="Document masking: tokens attend only within their own document when a sequence holds several"
    )
    reset_positions: bool | None = identity(
        None,
        description="Position ids restart at 0 at the start of each document; false: they count through the sequence; "
        "null: they restart in conversations and completions only. MPT also requires mask_across_documents",
    )
    pack: Pack = identity(
        "first_fit",
        description="Which conversations, completions or pairs share a sequence: first_fit takes them in their order, "
        "as many as fit; best_fit fills sequences from 16,384 of them at a time, with less padding",
    )
    stop_strategy: Literal["restart", "first_exhausted"] = identity(
        "restart", description="Action when a source of a mixture is exhausted: restart that source, or end the run"
    )
    shuffle: bool | Annotated[int, Field(ge=2)] = identity(
        False,
        description="Shuffle the sequences, in a new order each epoch: true shuffles all data, a number N shuffles "
        "within blocks of N sequences",
    )
    on_bad_record: Literal["error", "skip"] = identity(
        "error",
        description="Action for a record that is not JSON, lacks the key or has no text: stop, or skip and count it",
    )
    max_bad_fraction: float = identity(
        0.01,
        ge=0,
        le=1,
        description="Maximum fraction of bad records in a file with on_bad_record skip; more are an error",
    )
    max_document_bytes: int = execution(
        10_000_000,
        ge=1,
        description="Maximum document size in bytes; a longer one is an error unless the tokenizer can split it safely",
    )
    split_bytes: int = identity(
        256_000_000,
        ge=1,
        description="Part size in bytes: larger uncompressed .jsonl and .txt files are read in parts of this size, one "
        "shard each",
    )
    max_sequences_without_targets: int = execution(
        1000,
        ge=1,
        description="Number of sequences at the start of conversations or completions, one of which must have a target "
        "token",
    )
    mirror_dir: str = execution(
        "~/.cache/lmtrain/mirror", min_length=1, description="Folder of local copies of shards when cache_dir is a URL"
    )
    max_mirror_bytes: int = execution(
        100_000_000_000,
        ge=1,
        description="Maximum size of mirror_dir in bytes, approximately; least recently used copies are deleted first",
    )
    num_preprocess_workers: int | None = execution(
        None, ge=1, description="Number of tokenizer processes; null: one per core. Does not change the result"
    )

    @property
    def has_positions(self) -> bool:
        if self.reset_positions is None:
            return any(source.has_targets for source in self.sources().values())
        return self.reset_positions

    @property
    def has_pairs(self) -> bool:
        return any(isinstance(source.format, PreferenceFormat) for source in self.sources().values())

    @property
    def batch_types(self) -> dict[str, str]:
        """Dtypes of the arrays of a batch, each [rows, seq_len]; see `lmtrain/data/batches.py`."""
        types = {"tokens": "int32", "loss_mask": "bool"}
        more = {"segments": self.mask_across_documents, "positions": self.has_positions, "documents": self.has_pairs}
        return types | {name: "int32" for name, wanted in more.items() if wanted}

    @model_validator(mode="before")
    @classmethod
    def _demo_brings_its_tokenizer(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("demo"), str) and "tokenizer" not in value:
            return value | {"tokenizer": demo_tokenizer(value["demo"])}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        if "ema" in (self.configs or {}):
            raise field_error("configs", "'ema' cannot name a source: eval/ema are the metrics of averaged parameters")
        kinds = [kind for kind in ("demo", "configs") if getattr(self, kind)]
        others = [*kinds, *(kind for kind in ("train_urls", "validation_urls", "id") if getattr(self, kind))]
        if kinds and len(others) > 1:
            raise field_error(kinds[0], f"set together with {others[1]}; remove one ({kinds[0]}: null turns it off)")
        if self.configs and not isinstance(self.format, TextFormat):
            raise field_error("format", "applies to a single source; set it for each source in configs")
        formats = [type(source.format) for source in (self.configs or {}).values()] or [type(self.format)]
        if PreferenceFormat in formats:
            if set(formats) != {PreferenceFormat}:
                raise field_error("configs", "sources of preferences cannot be mixed with sources of other formats")
            if not self.mask_across_documents:
                raise field_error(
                    "mask_across_documents", "preferences require true: an answer would attend to the other one"
                )
        if isinstance(self.format, TokensFormat) and self.enforce_bos:
            raise field_error("enforce_bos", "has no effect on token ids, which stay as they are; remove it")
        if (self.tokenizer == "passthrough") != (self.vocab_size is not None):
            needed = "required by the tokenizer passthrough, which has no vocabulary"
            known = f"the tokenizer {self.tokenizer} defines its vocabulary size; remove this setting"
            raise field_error("vocab_size", needed if self.vocab_size is None else known)
        changes = [] if self.train_weights is None else self.weight_changes()
        steps = [step for step, _ in changes]
        if self.train_weights is not None and (steps[:1] != [0] or steps != sorted(set(steps))):
            raise field_error(
                "train_weights", f"expected [step, weights] entries with steps ascending from 0, got steps {steps}"
            )
        if any(not sum(weights.values()) for _, weights in changes):
            raise field_error("train_weights", "all weights are 0; set at least one above 0")
        weighted = {name for _, weights in changes for name in weights}
        for name in weighted - (self.configs or {}).keys():
            raise field_error("train_weights", f"unknown source {name!r}, not in configs")
        for name, source in (self.configs or {}).items():
            if changes and source.has_train and name not in weighted:
                raise field_error(
                    "train_weights", f"no weight for the source {name!r} of configs; set one (0 excludes the source)"
                )
        return self

    def weight_changes(self, names: Iterable[str] = ()) -> list[tuple[int, dict[str, float]]]:
        """(step, weights) from that step on; without `train_weights`, the sources `names` have equal weights."""
        weights = dict.fromkeys(names, 1.0) if self.train_weights is None else self.train_weights
        return [(0, weights)] if isinstance(weights, dict) else weights

    def has_weight(self, name: str) -> bool:
        """Whether training reads the source of this name; one with weight 0 is left out."""
        return any(weights.get(name, 0) > 0 for _, weights in self.weight_changes([name]))

    def urls(self, split: str) -> list[str]:
        """URLs of a split (`train` or `validation`) as written, before braces and globs are expanded."""
        if self.demo is not None:
            root = self.demo.rstrip("/")
            return [f"{root}/train.{{1..8}}-of-8.jsonl.gz" if split == "train" else f"{root}/validation.jsonl.gz"]
        is_train = split == "train" or self.validation_fraction is not None
        return list((self.train_urls if is_train else self.validation_urls) or [])

    def dataset_split(self, split: str) -> str:
        """Name that a split (`train` or `validation`) has in the dataset `id`."""
        is_train = split == "train" or self.validation_fraction is not None
        return self.split if is_train else self.validation_split or "validation"

    def sources(self) -> dict[str, "DataConfig"]:
        """Each source as a separate config, by name; a config without `configs` is its only source, named ""."""
        if self.configs is None:
            return {"": self}
        cache_dir = self.cache_dir.rstrip("/")
        return {
            name: self.model_copy(
                update=dict(source) | {"cache_dir": f"{cache_dir}/{name}", "configs": None, "train_weights": None}
            )
            for name, source in self.configs.items()
        }


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes by phase. `phases` are (first step, sequences per step), ascending from step 0; the last has no end.

    >>> sizes = BatchSizes.of([(0, 2), (10, 4)])
    >>> sizes.at(9), sizes.at(10), sizes.before(11)
    (2, 4, 24)
    """

    phases: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: int | Sequence[tuple[int, int]]) -> "BatchSizes":
        """From one size for all steps, or from pairs of (first step, size)."""
        return cls(((0, sizes),) if isinstance(sizes, int) else tuple(sizes))

    @property
    def all(self) -> list[int]:
        """All distinct sizes, ascending."""
        return sorted({size for _, size in self.phases})

    def at(self, step: int) -> int:
        """Batch size of step `step`, counted from 0."""
        return self.phases[bisect_right(self._starts, step) - 1][1]

    def before(self, step: int) -> int:
        """Number of sequences in all steps before `step`, which is the index of its first sequence."""
        ends = [*self._starts[1:], step]
        return sum(max(0, min(end, step) - start) * size for (start, size), end in zip(self.phases, ends, strict=True))

    def whole_steps(self, sequences: int) -> int:
        """Number of complete steps that `sequences` sequences fill."""
        steps = 0
        for (start, size), end in zip(self.phases, [*self._starts[1:], None], strict=True):
            fit = max(0, sequences - self.before(start)) // size
            if end is None or fit < end - start:
                return start + fit
            steps = end
        return steps

    @property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.phases]
