"""Comparison of an export in transformers with lmtrain: ids of texts, and logits, which require torch."""

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from lmtrain.hf.find_tokenizer import open_in_transformers
from lmtrain.hf.safetensors_file import read_header
from lmtrain.hf.tokenizer import COMPARED, Tokenizer
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import without_kernels
from lmtrain.runtime.errors import UserError
from lmtrain.sharding.mesh import Layout, MeshFunction

# Texts by whose ids `--verify` compares, besides the few of each export.
_MORE_TEXTS = (
    "def f(x1):\n    return {'a': [1, 2.50]}  # it's\r\n",
    "We've 12345678 things,   3 spaces, \ttabs; DON'T stop...",
    "Gr\u00fc\u00dfe, \u0421\u043b\u043e\u0432\u043e, \u4e2d\u6587\u6587\u672c\u3002\u0627\u0644\u0639",
    "e\u0301 \u1e9b\u0323 \u2460 \uff21 \u00a0\u200b\U0001f468\u200d\U0001f469",
    " leading and trailing  ",
    "",
)
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
    # the modules of several tokens are read by another class of transformers, and are its layers after the last one
    modules = getattr(theirs.config, "num_mtp_layers", 0)
    ahead = tuple(f"model.layers.{theirs.config.num_hidden_layers + number}." for number in range(modules))
    found = {kind: [name for name in names if not str(name).startswith(ahead)] for kind, names in loading.items()}
    left = {kind: sorted(names)[:5] for kind, names in found.items() if names}
    if left:
        raise UserError(f"{folder}: transformers reports missing or unexpected tensors: {left}")
    if base_model is not None:
        theirs = _with_adapters(theirs, folder)
    vocab_size = min(theirs.config.vocab_size, ours(np.zeros((1, 1), np.int32)).shape[-1])
    tokens = np.random.default_rng(0).integers(0, vocab_size, (_SEQUENCES, min(_POSITIONS, seq_len)))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens)).logits.float().numpy()[..., :vocab_size]
    difference = float(np.abs(ours(tokens)[..., :vocab_size] - expected).max())
    spread = float(expected.std())
    limit = _TOLERANCE if dtype == "float32" else _TOLERANCE_16_BIT
    if difference > limit * max(1.0, spread):
        raise UserError(f"{folder}: logits differ from transformers' by {difference:.2g}; please report it")
    return f"{folder}: logits agree with transformers' within {difference:.2g} (their spread is {spread:.2g})"


def different_ids(folder: str, tokenizer: Tokenizer, texts: Iterable[str] = COMPARED) -> str | None:
    """How the tokenizer of `folder` in transformers differs from that of training; None if it gives equal ids for the
    texts, alone and after special tokens."""
    backend = tokenizer.parsing_backend
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    tried = [*texts, *(f"{token}{text}" for token in special[:3] for text in texts)]
    try:
        theirs = open_in_transformers(folder)
        name = type(theirs).__name__
        ids = [theirs.encode(text, add_special_tokens=False, split_special_tokens=False) for text in tried]
    except Exception as error:  # the class may be unknown, or need other files
        return f"transformers cannot load it: {error}"
    for text, numbers in zip(tried, ids, strict=True):
        ours = backend.encode(text, add_special_tokens=False).ids
        if ours != numbers:
            return f"{name} of transformers gives other ids than tokenizer.json for {text!r}: {numbers}, not {ours}"
    return None


def check_ids(folder: str, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if transformers gives other ids for texts than training had, whatever the tokenizer."""
    if tokenizer.library is not None and (problem := different_ids(folder, tokenizer, (*COMPARED, *_MORE_TEXTS))):
        raise UserError(f"{folder}: {problem}; load it by PreTrainedTokenizerFast.from_pretrained there")


def build_logits(model: LanguageModel, params: Any, layout: Layout) -> Callable[[Any], Any]:
    """tokens [B, S] -> float32 logits [B, S, V], on the host."""
    model = without_kernels(model)
    function = MeshFunction(
        layout, jax.jit(lambda tokens: model.apply({"params": params}, tokens), out_shardings=layout.replicated)
    )
    return lambda tokens: jax.device_get(function(tokens))


def _with_adapters(model: Any, folder: str) -> Any:
    """The model with PEFT's adapters in `folder`, whose embedding tables may have more or fewer rows than its own."""
    from peft import PeftModel

    tensors = read_header(f"{folder}/adapter_model.safetensors")
    tables = [info.shape for name, info in tensors.items() if ".lora_" not in name]
    if tables and tables[0][0] != model.config.vocab_size:
        model.resize_token_embeddings(tables[0][0], mean_resizing=False)
    return PeftModel.from_pretrained(model, folder)
