"""Comparison of an export's logits in transformers with those of lmtrain. Requires torch."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError

# Number of sequences and positions to compare: enough to use every part of the model, and fast.
_SEQUENCES, _POSITIONS = 2, 64

# Maximum difference due to rounding, for float32 logits with a standard deviation of about one.
_TOLERANCE = 1e-4
_TOLERANCE_16_BIT = 5e-2


def require_torch(with_peft: bool = False) -> None:
    """Raise `UserError` if torch is not installed, or PEFT, which adapters need."""
    for name in ("torch", "peft") if with_peft else ("torch",):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--verify requires {name}: run `pip install {name}`, or omit --verify")


def compare_logits(
    folder: str, ours: Callable[[np.ndarray], np.ndarray], seq_len: int, dtype: str, base_model: str | None = None
) -> str:
    """Compare the logits of transformers for `folder` with `ours`, which maps tokens [B, S] to float32 [B, S, V].

    `dtype` is the dtype of the weights in the folder; `base_model` is the base of adapters in PEFT's format. Returns a
    line for the log. Raises `UserError` if the logits differ by more than rounding, or if transformers reports missing
    or unexpected tensors.
    """
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        base_model or folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=True
    )
    theirs, loading = loaded
    left = {name: sorted(found)[:5] for name, found in loading.items() if found}
    if left:
        raise UserError(f"{folder}: transformers reports missing or unexpected tensors: {left}")
    if base_model is not None:
        from peft import PeftModel

        theirs = PeftModel.from_pretrained(theirs, folder)
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
