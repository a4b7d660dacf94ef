"""Greedy decoding of a batch: texts are those of each prompt alone. On meshes: `tests/evaluation/benchmarks`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

from lmtrain.generation.decode import GreedyDecoder, SamplingSettings, sample
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout

SIZES = {"seq_len": 128, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}


def with_windows(**sizes):
    """Layers whose cache is shorter than prompts and chunks, next to full ones."""
    return LlamaConfig(**sizes, layer_pattern=["sliding", "full"], sliding_window=20)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig,
        with_windows,
        *(pytest.param(other, marks=pytest.mark.long) for other in (Gpt2Config, MptConfig, BackpackConfig)),
    ],
)
def test_greedy_texts_of_a_batch_are_those_of_each_prompt_alone(config):
    model, params = quick.writing_model(config(**SIZES), 40)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 40, length).tolist() for length in (90, 70, 66, 66)]
    settings = SamplingSettings(37, temperature=0)
    alone = [
        sample(model, params, jnp.array(prompt, jnp.int32), jax.random.key(0), settings, eos_id=None)
        for prompt in prompts
    ]
    decoder = GreedyDecoder(model, build_layout(PartitioningConfig()), "float32")
    found = decoder(params, prompts, 37, 128, lambda row, new: False)
    assert found == alone
    soon = decoder(params, prompts, 37, 128, lambda row, new: len(new) >= 3)
    assert all(3 <= len(new) < 37 for new in soon)
    assert soon == [new[: len(short)] for new, short in zip(alone, soon, strict=True)]
