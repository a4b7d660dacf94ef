"""The pages for users of nanoGPT, Levanter, MaxText, Megatron-LM and axolotl: tables, programs and configs."""

import contextlib
import json
import math
import re
from pathlib import Path

import jax
import pytest
from conftest import logged, run_in_process

from lmtrain.config.describe import describe
from lmtrain.config.load import load_config
from lmtrain.models.params import abstract_params, count_parameters, flatten
from lmtrain.models.registry import build_model
from lmtrain.optim.transforms import decay_mask
from lmtrain.run.config import RunConfig

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "configs" / "guide"
PAGES = ["from_nanogpt.md", "from_levanter.md", "from_maxtext.md", "from_megatron.md", "from_axolotl.md"]
DEFAULTS: dict[str, set[str]] = {}
for _group in describe(RunConfig):
    for _setting in _group.settings:
        DEFAULTS.setdefault(_setting.name, set()).add(_setting.default)
SECTIONS = {name.rpartition(".")[0] for name in DEFAULTS}
KINDS = {"model.type", "optimizer.type"}  # the name of a kind of section is none of its settings

NAME = re.compile(r"(?<!\()`((?:model|trainer|data|optimizer)\.[a-z_.]+|[a-z]+_[a-z_]+|epoch)(?:: [^`]+)?`")
DEFAULT = re.compile(r"`((?:model|trainer|data|optimizer)\.[a-z_.]+|[a-z]+_[a-z_]+)` \(`?([^`)]+?)`?(?: for \w+)?\)")


def columns_of_settings(page: str) -> list[str]:
    """The cells below `lmtrain (default)`."""
    cells, index = [], None
    for line in (GUIDES / page).read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else None
        if row is None:
            index = None
        elif any("lmtrain (default)" in cell for cell in row):
            index = next(number for number, cell in enumerate(row) if "lmtrain (default)" in cell)
        elif index is not None and not set(row[0]) <= set("- "):
            cells.append(row[index])
    return cells


def text_of(page: str) -> str:
    return (GUIDES / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_of_lmtrain_in_the_tables_exists(page):
    cells = columns_of_settings(page)
    assert len(cells) > 8
    named = {name for cell in cells for name in NAME.findall(cell)}
    assert len(named) > 10
    assert named - DEFAULTS.keys() - SECTIONS - KINDS == set()


@pytest.mark.parametrize("page", PAGES)
def test_the_defaults_in_the_tables_are_those_of_the_settings(page):
    found = [pair for cell in columns_of_settings(page) for pair in DEFAULT.findall(cell)]
    assert len(found) > 5
    wrong = [(name, default) for name, default in found if name not in KINDS and not is_default(name, default)]
    assert wrong == []


def is_default(name: str, written: str) -> bool:
    """Whether one of the kinds of a section has this default: 1e-4 is 0.0001."""
    for default in DEFAULTS[name]:
        with contextlib.suppress(ValueError):
            if float(default) == float(written):
                return True
    return written in DEFAULTS[name]


def test_the_shakespeare_config_trains_on_a_text_of_one_document(tmp_path):
    text = bytearray((ROOT / "README.md").read_text(encoding="utf-8").encode("ascii", "ignore")[:6000])
    text[4999] = text[5999] = ord(".")  # a newline at the end of a file would belong to no document
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "train.txt").write_bytes(text[:5000])
    (tmp_path / "shakespeare" / "validation.txt").write_bytes(text[5000:])
    tiny = ["--model", "{hidden_dim: 32, num_heads: 2, num_layers: 2, seq_len: 32}", "--trainer.train_batch_size", "4"]
    short = ["--trainer.num_train_steps", "2", "--optimizer.warmup", "1"]
    short += ["--trainer.tracker", "{type: json}", "--trainer.id", "char"]
    run_in_process(["train", "shakespeare_char", *tiny, *short], tmp_path, code=0)
    cache = tmp_path / "cache" / "shakespeare_char"
    for split, size in (("train", 5000), ("validation", 1000)):
        manifest = json.loads((cache / split / "manifest.json").read_text())
        # one token per character, newlines included, and no end-of-text token
        assert sum(shard["tokens"] for shard in manifest["shards"]) == size
    losses = list(logged(tmp_path, "train/loss", "char").values())
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(257), abs=0.5)


def test_the_shakespeare_config_decays_every_tensor_with_two_or_more_dimensions_as_nanogpt_does():
    config = load_config(RunConfig, str(ROOT / "configs" / "shakespeare_char.yaml")).config
    params = abstract_params(build_model(config.model, 257))
    shapes = {path: leaf.value.shape[path.startswith("blocks/") :] for path, leaf in flatten(params).items()}
    plain = jax.tree.map(lambda leaf: leaf.value, params, is_leaf=lambda leaf: hasattr(leaf, "names"))
    decays = flatten(decay_mask(config.optimizer, plain))
    assert {path: len(shape) >= 2 for path, shape in shapes.items()} == decays
    assert set(decays.values()) == {True, False}


def test_the_maxtext_config_has_the_parameters_of_its_default_model():
    model = load_config(RunConfig, str(ROOT / "configs" / "maxtext_default.yaml")).config.model
    embed, mlp, layers, vocab = 2048, 7168, 16, 32000
    expected = layers * (4 * embed**2 + 3 * embed * mlp + 2 * embed) + 2 * vocab * embed + embed
    assert count_parameters(build_model(model, vocab)) == expected
