"""Settings of the data: where the text is, how it becomes tokens, where the tokens are kept."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lmtrain.config.base import Section, planned
from lmtrain.config.errors import field_error


def demo_tokenizer(demo: str) -> str:
    """Where the demo keeps the tokenizer it learns."""
    return f"{demo.rstrip('/')}/tokenizer"


class SourceConfig(Section):
    """One source of text: files, or a Hugging Face dataset."""

    train_urls: list[str] | None = Field(
        None,
        description="Training files (.jsonl .json .txt .parquet, plain or .gz .zst .bz2 .xz): paths and URLs with "
        "braces ({1..8}) and globs (*), in this order; a line of a .txt is a document",
    )
    validation_urls: list[str] | None = Field(None, description="Validation files, written like train_urls")
    id: str | None = Field(None, min_length=1, description="Hugging Face dataset: a hub id or a local folder")
    name: str | None = Field(None, description="Configuration of the dataset `id`; null: its default")
    stream: bool = Field(False, description="Read the dataset `id` as a stream instead of downloading it first")
    text_key: str = Field("text", description="Key of the text in each JSON line", min_length=1)

    @model_validator(mode="after")
    def _one_kind(self) -> "SourceConfig":
        if self.id is not None and (self.train_urls or self.validation_urls):
            raise field_error("id", "set together with train_urls or validation_urls; remove one of them")
        for setting in ("name", "stream"):
            if getattr(self, setting) and self.id is None:
                raise field_error(setting, "is about a Hugging Face dataset, and no id is set")
        return self


def _sorted_steps(value: Any) -> Any:
    steps = [entry[0] for entry in value] if isinstance(value, list) and all(map(_is_pair, value)) else None
    if steps is not None and (steps[:1] != [0] or steps != sorted(set(steps))):
        raise ValueError(f"weights that change are entries of [step, map], the first at step 0, ascending, not {steps}")
    return value


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], int)


Weights = dict[str, Annotated[float, Field(ge=0)]]


class DataConfig(SourceConfig):
    """Text sources, tokenizer and token cache."""

    demo: str | None = Field(
        None,
        description="Folder of the built-in demo, made on first use: the running Python's standard library as "
        "train and validation files, and an 8k tokenizer learned from it. Stands in for the two url settings",
    )
    configs: dict[str, SourceConfig] | None = planned(None, description="Sources to mix, by name")
    train_weights: Weights | Annotated[list[tuple[int, Weights]], BeforeValidator(_sorted_steps)] | None = planned(
        None, description="Share of each of `configs`; or a list of [step, shares] where the shares change; null: equal"
    )
    tokenizer: str = Field(
        "gpt2",
        min_length=1,
        description="A folder or URL with a tokenizer.json, a hub id (owner/name@revision), a sentencepiece .model, or "
        "byte (256 bytes, built in)",
    )
    cache_dir: str = Field(
        "cache/", min_length=1, description="Folder of the tokenized data; <cache_dir>/<split>/ for each split"
    )
    enforce_eos: bool = Field(True, description="End every document with the tokenizer's end-of-text token")
    enforce_bos: bool = Field(False, description="Begin every document with the tokenizer's begin-of-text token")
    shuffle: bool = Field(False, description="Read the sequences of each epoch in an order of its own, by the seed")
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
    num_preprocess_workers: int | None = Field(
        None, ge=1, description="Processes that tokenize; null means one per core. Never changes the result"
    )

    @model_validator(mode="before")
    @classmethod
    def _demo_brings_its_tokenizer(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("demo"), str) and "tokenizer" not in value:
            return value | {"tokenizer": demo_tokenizer(value["demo"])}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        kinds = [kind for kind in ("demo", "configs") if getattr(self, kind)]
        others = [*kinds, *(kind for kind in ("train_urls", "validation_urls", "id") if getattr(self, kind))]
        if kinds and len(others) > 1:
            raise field_error(kinds[0], f"set together with {others[1]}; remove one ({kinds[0]}: null turns it off)")
        mixed = self.train_weights or {}
        shares = [mixed] if isinstance(mixed, dict) else [shares for _, shares in mixed]
        for name in {name for share in shares for name in share}:
            if name not in (self.configs or {}):
                raise field_error("train_weights", f"{name!r} is none of the sources in configs")
        return self

    def urls(self, split: str) -> list[str]:
        """The urls of a split (`train` or `validation`) as written, before braces and globs; empty if it has none."""
        if self.demo is not None:
            root = self.demo.rstrip("/")
            return [f"{root}/train.{{1..8}}-of-8.jsonl.gz" if split == "train" else f"{root}/validation.jsonl.gz"]
        return list((self.train_urls if split == "train" else self.validation_urls) or [])
