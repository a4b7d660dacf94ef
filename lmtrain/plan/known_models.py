"""Sizes of public models, to plan continued pretraining without downloading their `config.json`."""

from typing import Any

_LLAMA_3_8B = {
    "type": "llama",
    "hidden_dim": 4096,
    "intermediate_dim": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "seq_len": 8192,
}

# Settings of the `model` section; missing ones have the family's default.
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"type": "gpt2", "hidden_dim": 768, "num_layers": 12, "num_heads": 12},
    "gpt2-medium": {"type": "gpt2", "hidden_dim": 1024, "num_layers": 24, "num_heads": 16},
    "gpt2-large": {"type": "gpt2", "hidden_dim": 1280, "num_layers": 36, "num_heads": 20},
    "gpt2-xl": {"type": "gpt2", "hidden_dim": 1600, "num_layers": 48, "num_heads": 25},
    "meta-llama/Llama-2-7b-hf": {
        "type": "llama",
        "hidden_dim": 4096,
        "intermediate_dim": 11008,
        "num_layers": 32,
        "num_heads": 32,
        "seq_len": 4096,
    },
    "meta-llama/Llama-2-13b-hf": {
        "type": "llama",
        "hidden_dim": 5120,
        "intermediate_dim": 13824,
        "num_layers": 40,
        "num_heads": 40,
        "seq_len": 4096,
    },
    "meta-llama/Llama-2-70b-hf": {
        "type": "llama",
        "hidden_dim": 8192,
        "intermediate_dim": 28672,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
        "seq_len": 4096,
    },
    "meta-llama/Meta-Llama-3-8B": _LLAMA_3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA_3_8B,
    "mosaicml/mpt-7b": {"type": "mpt", "hidden_dim": 4096, "num_layers": 32, "num_heads": 32, "seq_len": 2048},
    "stanfordnlp/backpack-gpt2": {"type": "backpack", "hidden_dim": 768, "num_layers": 12, "num_heads": 12},
}
