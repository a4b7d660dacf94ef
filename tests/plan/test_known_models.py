"""Sizes of models and tokenizers that are not here."""

import pytest
from conftest import TOKENIZER

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.data.config import DataConfig
from lmtrain.plan.known_models import find_vocab_size, with_model_sizes
from lmtrain.runtime.errors import UserError


def data(**values) -> DataConfig:
    return DataConfig(**{"train_urls": ["x"], **values})


def test_the_vocabulary_comes_from_the_flag_the_config_a_folder_or_the_table(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_vocab_size(data(), 7) == (7, "--vocab_size")
    assert find_vocab_size(data(tokenizer="passthrough", vocab_size=9, enforce_eos=False), None)[0] == 9
    assert find_vocab_size(data(), None) == (50257, "known size of gpt2")
    assert find_vocab_size(data(tokenizer="meta-llama/Meta-Llama-3-8B@main"), None)[0] == 128256
    assert find_vocab_size(data(tokenizer=str(TOKENIZER)), None)[0] == 384
    assert find_vocab_size(data(tokenizer="byte"), None)[0] == 257
    assert find_vocab_size(DataConfig(demo="nowhere", tokenizer="nowhere/tokenizer"), None)[0] == 8192
    with pytest.raises(UserError, match="--vocab_size N"):
        find_vocab_size(data(tokenizer="who/knows"), None)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama3_8b_continued", {"type": "llama", "intermediate_dim": 14336, "num_kv_heads": 8}),
        ("llama2_7b_continued", {"type": "llama", "hidden_dim": 4096, "num_kv_heads": None}),
        ("mpt_7b_continued", {"type": "mpt", "hidden_dim": 4096, "num_layers": 32}),
    ],
)
def test_a_shipped_config_of_a_known_model_has_its_sizes(name, sizes):
    run = with_model_sizes(parse_run(Parser("plan", ""), [name])[1])
    assert run.config.model.model_dump().items() >= sizes.items()
