"""Settings of the data: where the text is, how it becomes tokens, where the tokens are kept."""

from typing import Any

from pydantic import Field, model_validator

from lmtrain.config.base import Section


def demo_tokenizer(demo: str) -> str:
    """Where the demo keeps the tokenizer it learns."""
    return f"{demo.rstrip('/')}/tokenizer"


class DataConfig(Section):
    """Text sources, tokenizer and token cache."""

    train_urls: list[str] | None = Field(
        None, description="Training files (.jsonl, .jsonl.gz): paths with braces ({1..8}) and globs (*), in this order"
    )
    validation_urls: list[str] | None = Field(None, description="Validation files, written like train_urls")
    demo: str | None = Field(
        None,
        description="Folder of the built-in demo, made on first use: the running Python's standard library as "
        "train and validation files, and an 8k tokenizer learned from it. Stands in for the two url settings",
    )
    cache_dir: str = Field(
        "cache/", min_length=1, description="Folder of the tokenized data; <cache_dir>/<split>/ for each split"
    )
    tokenizer: str = Field("gpt2", description="Folder with a tokenizer.json (Hugging Face format)")
    text_key: str = Field("text", description="Key of the text in each JSON line", min_length=1)
    enforce_eos: bool = Field(True, description="End every document with the tokenizer's end-of-text token")
    enforce_bos: bool = Field(False, description="Begin every document with the tokenizer's begin-of-text token")
    shuffle: bool = Field(False, description="Read the sequences of each epoch in an order of its own, by the seed")
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
        if self.demo is not None and (self.train_urls or self.validation_urls):
            raise ValueError("demo and train_urls/validation_urls are both set; remove one (`demo: null` turns it off)")
        return self

    def urls(self, split: str) -> list[str]:
        """The urls of a split (`train` or `validation`) as written, before braces and globs; empty if it has none."""
        if self.demo is not None:
            root = self.demo.rstrip("/")
            return [f"{root}/train.{{1..8}}-of-8.jsonl.gz" if split == "train" else f"{root}/validation.jsonl.gz"]
        return list((self.train_urls if split == "train" else self.validation_urls) or [])
