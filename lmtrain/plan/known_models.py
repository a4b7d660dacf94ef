"""Sizes of public models and of their tokenizers, to plan runs without downloading their files."""

import os
from typing import Any

from lmtrain.data.config import DataConfig
from lmtrain.hf.weight_files import read_model_config
from lmtrain.models.registry import hf_family
from lmtrain.objectives.config import DistillConfig
from lmtrain.preprocess.prepare_demo import VOCAB_SIZE, missing_demo_tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.run import ResolvedSettings, Run, resolve
from lmtrain.runtime.errors import UserError, errors_of
from lmtrain.weights.hf_config import hf_ref, resolve_hf

_COLUMNS = ("type", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads", "seq_len")
_MODELS = {
    "meta-llama/Llama-2-7b-hf": ("llama", 4096, 11008, 32, 32, None, 4096),
    "meta-llama/Llama-2-13b-hf": ("llama", 5120, 13824, 40, 40, None, 4096),
    "meta-llama/Llama-2-70b-hf": ("llama", 8192, 28672, 80, 64, 8, 4096),
    "meta-llama/Meta-Llama-3-8B": ("llama", 4096, 14336, 32, 32, 8, 8192),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama", 4096, 14336, 32, 32, 8, 8192),
    "gpt2": ("gpt2", 768, None, 12, 12, None, 1024),
    "gpt2-medium": ("gpt2", 1024, None, 24, 16, None, 1024),
    "gpt2-large": ("gpt2", 1280, None, 36, 20, None, 1024),
    "gpt2-xl": ("gpt2", 1600, None, 48, 25, None, 1024),
    "mosaicml/mpt-7b": ("mpt", 4096, None, 32, 32, None, 2048),
    "stanfordnlp/backpack-gpt2": ("backpack", 768, None, 12, 12, None, 1024),
}

# Vocabulary sizes of public tokenizers, including added tokens, as counted by the library `tokenizers`.
KNOWN_TOKENIZERS = {
    "gpt2": 50257,
    "openai-community/gpt2": 50257,
    "EleutherAI/gpt-neox-20b": 50277,
    "mosaicml/mpt-7b": 50277,
    "meta-llama/Llama-2-7b-hf": 32000,
    "meta-llama/Llama-2-13b-hf": 32000,
    "meta-llama/Llama-2-70b-hf": 32000,
    "NousResearch/Llama-2-7b-hf": 32000,
    "meta-llama/Meta-Llama-3-8B": 128256,
    "meta-llama/Meta-Llama-3-8B-Instruct": 128256,
    "meta-llama/Meta-Llama-3-70B": 128256,
    "meta-llama/Llama-3.1-8B": 128256,
    "meta-llama/Llama-3.2-1B": 128256,
    "mistralai/Mistral-7B-v0.1": 32000,
    "mistralai/Mixtral-8x7B-v0.1": 32000,
    "Qwen/Qwen3-30B-A3B": 151669,
    "allenai/OLMoE-1B-7B-0924": 50280,
    "google/gemma-2b": 256000,
    "google/gemma-7b": 256000,
    "stanford-crfm/backpack-gpt2": 50257,
    "byte": 257,
    # not counted: the rows of the models' embeddings, which are more
    "openai/gpt-oss-20b": 201088,
    "deepseek-ai/DeepSeek-V2-Lite": 102400,
}

# Made by tools/demo_chat.py: the demo's tokenizer with two more tokens.
_DEMO_CHAT = "demo/chat/tokenizer"


def teacher_config(config: RunConfig) -> dict[str, Any] | None:
    """The config.json of the teacher of a distillation. Raises `UserError` if it cannot be read."""
    if not isinstance(config.objective, DistillConfig):
        return None
    with errors_of("objective.teacher"):
        return read_model_config(config.objective.teacher)


def with_model_sizes(run: Run) -> Run:
    """With `use_hf_model_config`, the sizes of a model in a local folder or of a known one; nothing is downloaded.

    With LoRA also the dtype of the base, for a model that is not here as published for its family.
    """
    ref = hf_ref(run.config)
    lora = run.config.lora
    is_here = os.path.exists(run.config.initialize_from_checkpoint_path or "") if ref is None else os.path.isdir(ref)
    if is_here and (lora is not None or run.config.use_hf_model_config):
        return resolve_hf(run, check_tokenizer=False)
    if ref is not None and run.config.use_hf_model_config:
        run = _with_known_sizes(run, ref)
    if lora is not None and lora.base_dtype is None:
        dtype = hf_family(run.config.model.type).PUBLISHED_DTYPE
        run = resolve(
            run, ResolvedSettings("the dtype in which the family is published", {"lora": {"base_dtype": dtype}})
        )
    return run


def _with_known_sizes(run: Run, ref: str) -> Run:
    """Raises `UserError` for a model whose sizes are not known."""
    name = ref.partition("@")[0]
    if name not in _MODELS:
        raise UserError(
            f"use_hf_model_config: the sizes of {ref} are unknown without downloading it; add --use_hf_model_config "
            "false and write them into the model section, or set initialize_from_hf to a local folder"
        )
    sizes = {column: size for column, size in zip(_COLUMNS, _MODELS[name], strict=True) if size is not None}
    given = run.config.model.model_dump(include=run.config.model.model_fields_set - {"type"})
    return resolve(run, ResolvedSettings(f"the known sizes of {ref}", {"model": sizes | given}))


def find_vocab_size(data: DataConfig, given: int | None) -> tuple[int, str]:
    """The number of tokens, and its origin for the report; no file needs to exist.

    In this order: `given` on the command line, `data.vocab_size`, an existing local tokenizer, the table of known
    names. Raises `UserError` if none of them has it.
    """
    if given is not None:
        return given, "--vocab_size"
    if data.vocab_size is not None:
        return data.vocab_size, "data.vocab_size"
    if missing_demo_tokenizer(data):
        return VOCAB_SIZE, "the demo tokenizer, which is not built yet"
    name = data.tokenizer
    if name == _DEMO_CHAT and not os.path.exists(name):
        return VOCAB_SIZE + 2, "the chat tokenizer of the demo, which is not built yet"
    if os.path.exists(os.path.expanduser(name)):
        from lmtrain.hf.find_tokenizer import open_tokenizer

        return open_tokenizer(name).vocab_size, f"tokenizer {name}"
    known = KNOWN_TOKENIZERS.get(name.partition("@")[0])
    if known is not None:
        return known, f"known size of {name}"
    raise UserError(f"the vocabulary size of data.tokenizer {name} is unknown before a download; add --vocab_size N")
