"""Small models and their tensors in the Hugging Face format."""

import jax
import numpy as np
from hf_tensors import to_hf

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.params import abstract_params, flatten, unflatten
from lmtrain.models.registry import build_model, hf_family
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.load_hf import load_hf_params

VOCAB, LENGTH = 10, 12
SIZES = {"hidden_dim": 8, "num_heads": 2, "num_layers": 2, "seq_len": LENGTH}
GPT2 = Gpt2Config(**SIZES)
LLAMA = LlamaConfig(**SIZES, intermediate_dim=12)
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def random_params(config, vocab: int = VOCAB):
    """Parameters of a model; padding of the vocabulary is 0."""
    model = build_model(config, vocab)
    rng = np.random.default_rng(5)
    flat = {}
    for path, leaf in flatten(abstract_params(model)).items():
        value = rng.normal(size=leaf.value.shape).astype(np.float32)
        if "vocab" in leaf.names:
            value[vocab:] = 0
        flat[path] = value
    return unflatten(flat)


def tensors_of(config, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    return to_hf(hf_family(config.type).table(config), random_params(config, vocab), config.num_layers, vocab)


WEIGHTS = "model.safetensors"


def load(ref: str, config, vocab: int = VOCAB, dtype: str = "float32") -> dict[str, np.ndarray]:
    params = load_hf_params(ref, config, build_model(config, vocab), build_layout(PartitioningConfig()), dtype)
    return flatten(jax.device_get(params))


def assert_same(found, expected) -> None:
    """Both by path; equal in type, shape and every bit."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
        assert found[path].tobytes() == value.tobytes(), path
