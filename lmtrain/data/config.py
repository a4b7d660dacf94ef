"""Settings of the data: where the text is, how it becomes tokens, where the tokens are kept."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, model_validator

from lmtrain.config.base import Section
from lmtrain.config.errors import field_error


def demo_tokenizer(demo: str) -> str:
    """Where the demo keeps the tokenizer it learns."""
    return f"{demo.rstrip('/')}/tokenizer"


class SourceConfig(Section):
    """One source of text: files, or a Hugging Face dataset."""

    train_urls: list[str] | None = Field(
        None,
        description="Training files (.jsonl .json .txt .parquet, plain or .gz .zst .bz2 .xz): paths and URLs with "
        "braces ({1..8}) and globs (*), in this order",
    )
    validation_urls: list[str] | None = Field(None, description="Validation files, written like train_urls")
    id: str | None = Field(None, min_length=1, description="Hugging Face dataset: a hub id or a local folder")
    name: str | None = Field(None, description="Configuration of the dataset `id`; null: its default")
    stream: bool = Field(False, description="Read the dataset `id` as a stream instead of downloading it first")
    text_key: str = Field("text", description="Key of the text in each JSON line", min_length=1)
    text_documents: Literal["line", "blank_line", "file"] = Field(
        "line",
        description="What is a document in a .txt: each line, what stands between blank lines, or the whole file",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceConfig":
        if self.id is not None and (self.train_urls or self.validation_urls):
            raise field_error("id", "set together with train_urls or validation_urls; remove one of them")
        for setting in ("name", "stream"):
            if getattr(self, setting) and self.id is None:
                raise field_error(setting, "is about a Hugging Face dataset, and no id is set")
        return self

    @property
    def has_train(self) -> bool:
        """Whether it has training text, as far as its settings say."""
        return bool(self.train_urls or self.id)


# Names folders and metrics.
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Weights = dict[str, Annotated[float, Field(ge=0)]]


class DataConfig(SourceConfig):
    """Text sources, tokenizer and token cache."""

    demo: str | None = Field(
        None,
        min_length=1,
        description="Folder of the built-in demo, made on first use: the running Python's standard library as "
        "train and validation files, and an 8k tokenizer learned from it. Stands in for the two url settings",
    )
    configs: dict[SourceName, SourceConfig] | None = Field(
        None, description="Sources to mix, by name; each has its cache in cache_dir/<name>, and is evaluated by name"
    )
    train_weights: Weights | list[tuple[StrictInt, Weights]] | None = Field(
        None, description="Share of each of `configs`; or a list of [step, shares] where the shares change; null: equal"
    )
    tokenizer: str = Field(
        "gpt2",
        min_length=1,
        description="A folder or URL with a tokenizer.json, such a file, a vocab.json with its merges.txt, a "
        "sentencepiece .model, a hub id (owner/name@revision), "
        "byte (256 bytes, built in), or passthrough (documents are lists of token ids)",
    )
    vocab_size: int | None = Field(
        None, ge=1, le=2**32, description="Number of token ids there are, for the tokenizer passthrough only"
    )
    cache_dir: str = Field(
        "cache/", min_length=1, description="Folder of the tokenized data; <cache_dir>/<split>/ for each split"
    )
    enforce_eos: bool = Field(True, description="End every document with the tokenizer's end-of-text token")
    enforce_bos: bool = Field(False, description="Begin every document with the tokenizer's begin-of-text token")
    mask_across_documents: bool = Field(
        True, description="Tokens attend only to their own document, where a sequence holds several"
    )
    reset_positions: bool = Field(
        False,
        description="Positions begin at 0 with each document, or with its part in a sequence; off, they continue "
        "through the sequence. MPT needs mask_across_documents with it",
    )
    stop_strategy: Literal["restart", "first_exhausted"] = Field(
        "restart", description="When a source of a mixture is used up: begin it again, or end the run"
    )
    shuffle: bool | Annotated[int, Field(ge=2)] = Field(
        False,
        description="Read the sequences of each epoch in an order of its own, by the seed; a number shuffles within "
        "stretches of so many sequences",
    )
    on_bad_record: Literal["error", "skip"] = Field(
        "error", description="A record that is not JSON, lacks the key or holds no text: stop, or count it and go on"
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="With on_bad_record skip: more bad records than this share of a file are an error"
    )
    max_document_bytes: int = Field(
        10_000_000,
        ge=1,
        description="Longer documents are an error, unless the tokenizer can split them safely",
    )
    split_bytes: int = Field(
        256_000_000,
        ge=1,
        description="Larger .jsonl and .txt files that are not compressed are read in parts of so many bytes, each a "
        "shard of its own",
    )
    mirror_dir: str = Field(
        "~/.cache/lmtrain/mirror",
        min_length=1,
        description="Folder for copies of shards, of a cache_dir that is a URL",
    )
    max_mirror_bytes: int = Field(
        100_000_000_000, ge=1, description="The copies in mirror_dir take about so much; the longest unused go first"
    )
    num_preprocess_workers: int | None = Field(
        None, ge=1, description="Processes that tokenize; null means one per core. Never changes the result"
    )

    @property
    def batch_types(self) -> dict[str, str]:
        """The arrays of a batch, [rows, seq_len] each, and their types; see `lmtrain/data/batches.py`."""
        types = {"tokens": "int32", "loss_mask": "bool"}
        more = {"segments": self.mask_across_documents, "positions": self.reset_positions}
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
        if (self.tokenizer == "passthrough") != (self.vocab_size is not None):
            needed = "needed by the tokenizer passthrough, which cannot know it"
            known = f"the tokenizer {self.tokenizer} has its own; remove it"
            raise field_error("vocab_size", needed if self.vocab_size is None else known)
        mixed = {} if self.train_weights is None else self.train_weights
        steps = [] if isinstance(mixed, dict) else [step for step, _ in mixed]
        if not isinstance(mixed, dict) and (steps[:1] != [0] or steps != sorted(set(steps))):
            raise field_error(
                "train_weights", f"entries of [step, map] begin at step 0 and ascend, but are at steps {steps}"
            )
        shares = [mixed] if isinstance(mixed, dict) else [shares for _, shares in mixed]
        shares = shares if self.train_weights is not None else []
        if any(not sum(share.values()) for share in shares):
            raise field_error("train_weights", "give no source any weight")
        for name in {name for share in shares for name in share}:
            if name not in (self.configs or {}):
                raise field_error("train_weights", f"{name!r} is none of the sources in configs")
        for name, source in (self.configs or {}).items():
            if shares and source.has_train and all(name not in share for share in shares):
                raise field_error("train_weights", f"leave out {name!r}, which is in configs; set it, to 0 for none")
        return self

    def urls(self, split: str) -> list[str]:
        """The urls of a split (`train` or `validation`) as written, before braces and globs; empty if it has none."""
        if self.demo is not None:
            root = self.demo.rstrip("/")
            return [f"{root}/train.{{1..8}}-of-8.jsonl.gz" if split == "train" else f"{root}/validation.jsonl.gz"]
        return list((self.train_urls if split == "train" else self.validation_urls) or [])

    def sources(self) -> dict[str, "DataConfig"]:
        """Each source as a config of its own, by name; a config without `configs` is its own only source, named ""."""
        if self.configs is None:
            return {"": self}
        cache_dir = self.cache_dir.rstrip("/")
        return {
            name: self.model_copy(
                update=dict(source) | {"cache_dir": f"{cache_dir}/{name}", "configs": None, "train_weights": None}
            )
            for name, source in self.configs.items()
        }
