"""A tiny model."""

import pytest
from conftest import TOKENIZER
from models import quick

from lmtrain.evaluation.interface import Context
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout

SIZES = {"seq_len": 128, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}


@pytest.fixture(scope="module")
def gpt2():
    tokenizer = load_tokenizer(str(TOKENIZER))
    model, params = quick.writing_model(Gpt2Config(**SIZES), tokenizer.vocab_size)
    layout = build_layout(PartitioningConfig())
    return Context(
        model=model, layout=layout, compute_dtype="float32", tokenizer=tokenizer, sets={}, seq_len=128, batch_size=2
    ), params
