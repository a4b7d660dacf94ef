"""Whether an export is the same function in transformers: logits, compared. Needs torch, which only this uses."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError

# Sequences and positions that are compared: enough to reach every part, little to wait for.
_SEQUENCES, _POSITIONS = 2, 64

# Above this, in logits of float32 with a spread of about one, it is another function rather than rounding.
_TOLERANCE = 1e-4
_TOLERANCE_16_BIT = 5e-2


def require_torch() -> None:
    """Raises `UserError` if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("--verify: needs torch; `pip install torch`, or leave it out")


def compare_logits(folder: str, ours: Callable[[np.ndarray], np.ndarray], seq_len: int, dtype: str) -> str:
    """What transformers computes from `folder` against `ours`: tokens [B, S] -> float32 logits [B, S, V].

    `dtype` is that of the weights in it. -> a line for the log. Raises `UserError` if they differ by more than
    rounding, or if tensors are left over.
    """
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=True
    )
    theirs, loading = loaded
    left = {name: sorted(found)[:5] for name, found in loading.items() if found}
    if left:
        raise UserError(f"{folder}: transformers does not find the same tensors: {left}")
    vocab_size = theirs.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, (_SEQUENCES, min(_POSITIONS, seq_len)))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens)).logits.float().numpy()
    found = ours(tokens)
    difference = float(np.abs(found - expected).max())
    spread = float(expected.std())
    limit = _TOLERANCE if dtype == "float32" else _TOLERANCE_16_BIT
    if difference > limit * max(1.0, spread):
        raise UserError(f"{folder}: logits differ from transformers' by {difference:.2g}; please report it")
    return f"{folder}: logits agree with transformers' within {difference:.2g} (their spread is {spread:.2g})"
