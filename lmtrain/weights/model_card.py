"""README.md of an export, the page that the Hugging Face Hub shows: what the model is, how it was trained, its losses.

It depends only on the run and the step, so that two exports of a checkpoint are equal. Its last line has the SHA-256 of
what is above: a page that was edited is no longer one of lmtrain, and an export does not replace it.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from lmtrain import __version__
from lmtrain.data.config import BatchSizes
from lmtrain.runtime.redact import redact
from lmtrain.runtime.storage import fill_run_id

CARD = "README.md"

# The beginning of a line of metrics; and the numbers of training and evaluation in it, by the beginning of their names.
_STEP = re.compile(rb'\{"step": (\d+)')
_VALUES = {"train/loss": re.compile(rb'"train/loss": -?\d'), "eval/": re.compile(rb'"eval/[^"]*": -?\d')}
_MARK = re.compile(rb"<!-- lmtrain ([0-9a-f]{64}) -->\n")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What the page says of a run: its id and its complete config, without secrets, as plain data. `initial` is the
    model of Hugging Face that it began with, if any; `averaged` are the steps whose mean the model is, if it is one.
    """

    run: str
    config: Mapping[str, Any]
    initial: str | None
    averaged: tuple[int, ...] = ()

    def page(self, step: int, dtype: str, parameters: int, is_adapter: bool, base: str | None = None) -> bytes:
        """The page of an export of the model after `step` updates; `base` is that of adapters, by default `initial`."""
        base = redact(base or self.initial)
        kind = self.config["model"]["type"]
        what = "Adapters (LoRA)" if is_adapter else "A language model"
        if self.config.get("lora") and not is_adapter:
            what += ", with adapters (LoRA) merged into it,"
        of = f", for `{base}`" if is_adapter and base else ""
        text = f"---\n{_front_matter(is_adapter, base)}---\n\n# {self.run}\n\n"
        text += f"{what} of {parameters:,} parameters{of} ({kind}, {dtype}), trained with lmtrain.\n\n"
        text += "| | |\n|---|---|\n" + "".join(f"| {name} | {_cell(value)} |\n" for name, value in self._facts(step))
        settings = yaml.safe_dump(dict(self.config), allow_unicode=True, width=120)
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", settings)), 0)
        text += f"\n<details><summary>Settings of the run</summary>\n\n{fence}yaml\n{settings}{fence}\n\n</details>\n\n"
        content = text.encode()
        return content + f"<!-- lmtrain {hashlib.sha256(content).hexdigest()} -->\n".encode()

    def _facts(self, step: int) -> Iterator[tuple[str, str]]:
        model, trainer = self.config["model"], self.config["trainer"]
        batch = trainer["train_batch_size"]
        sizes = BatchSizes.of(batch if isinstance(batch, int) else [(part["start"], part["value"]) for part in batch])
        tokens = sizes.before(step) * model["seq_len"]
        yield "Steps", f"{step:,} of {trainer['num_train_steps']:,}"
        if self.averaged:
            yield "Average of the steps", ", ".join(f"{number:,}" for number in self.averaged)
        yield "Training tokens", f"{tokens:,}, in sequences of {model['seq_len']:,}"
        if not self.averaged:  # losses are those of single steps
            yield from self._losses(step)
        if initial := redact(self.initial) or self.config.get("initialize_from_checkpoint_path"):
            yield "Initial model", f"`{initial}`"
        data = self.config["data"]
        weights = data.get("train_weights")
        for name, source in sorted((data.get("configs") or {"": data}).items()):
            where = source.get("demo") or source.get("id") or " ".join(source.get("train_urls") or [])
            share = f", weight {weights.get(name, 0)}" if isinstance(weights, dict) else ""
            yield f"Data {name}".strip(), f"`{where}`{share}"
        yield "Tokenizer", f"`{data['tokenizer']}`"
        yield "Written by", f"lmtrain {__version__}"

    def _losses(self, step: int) -> Iterator[tuple[str, str]]:
        """The last training loss and the results of the last evaluation, up to the step; none without the run's log."""
        folder = fill_run_id(self.config["trainer"]["log_dir"], self.run)
        for at, prefix in _last_lines(os.path.join(folder, f"{self.run}.metrics.jsonl"), step):
            for name, value in sorted(at.items()):
                if name.startswith(prefix) and isinstance(value, int | float):
                    shown = f"{value:,.0f}" if float(value).is_integer() else f"{value:.4f}"
                    yield f"`{name}`, step {at['step']:,}", shown


def _last_lines(path: str, step: int) -> Iterator[tuple[dict[str, Any], str]]:
    """The values of the last line with a training loss, and of the last step with results of evaluations, up to a step,
    each with the beginning of the names. Other lines of the log, of which a long run has millions, are not parsed."""
    lines: dict[str, list[bytes]] = {prefix: [] for prefix in _VALUES}
    last = dict.fromkeys(_VALUES, -1)
    try:
        with open(path, "rb") as file:
            for line in file:
                begin = _STEP.match(line)
                number = int(begin[1]) if begin else step + 1
                for prefix, has_value in _VALUES.items() if number <= step else ():
                    if has_value.search(line):
                        lines[prefix] = [*(lines[prefix] if number == last[prefix] else []), line]
                        last[prefix] = number
    except OSError:
        return
    for prefix, own in lines.items():
        values: dict[str, Any] = {}
        for line in own:
            with suppress(ValueError):  # a line that is half written
                values |= json.loads(line)
        yield values, prefix


def is_unchanged_card(content: bytes) -> bool:
    """Whether a page is one of lmtrain that nobody has edited."""
    mark = _MARK.fullmatch(content[content.rfind(b"<!--") :]) if b"<!--" in content else None
    above = content[: content.rfind(b"<!--")]
    return mark is not None and mark[1].decode() == hashlib.sha256(above).hexdigest()


def _front_matter(is_adapter: bool, base: str | None) -> str:
    """What the Hub reads."""
    values: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    values |= {"pipeline_tag": "text-generation", "tags": ["lmtrain"]}
    if base is not None and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) and not os.path.exists(base):
        values["base_model"] = base
    return yaml.safe_dump(values, sort_keys=False)


def _cell(text: str) -> str:
    """A text in a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
