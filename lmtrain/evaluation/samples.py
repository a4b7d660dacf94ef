"""Text that the model generates from fixed prompts during training, `trainer.sample_prompts`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.evaluation.interface import Context
from lmtrain.generation.decode import SamplingSettings, build_batch_sampler, pad_prompts, until_eos
from lmtrain.hf.tokenizer import Tokenizer, encode_prompt
from lmtrain.runtime.errors import UserError, counted

_MAX_CHARACTERS = 300  # of a text in the log


def encode_prompts(
    prompts: Sequence[str], length: int, tokenizer: Tokenizer, seq_len: int, bos: bool
) -> list[list[int]]:
    """The token ids of each prompt. Raises `UserError` if one is too long for the model with `length` more tokens."""
    encoded = []
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt, "trainer.sample_prompts", bos)
        if len(ids) + length > seq_len:
            raise UserError(
                f"trainer.sample_prompts: {prompt!r}, {counted(len(ids), 'token')}, with trainer.sample_length "
                f"{length}: longer than model.seq_len {seq_len}"
            )
        encoded.append(ids)
    return encoded


class Samples:
    """Continues each prompt with up to `length` tokens, sampled as `lmtrain generate` does by default.

    A text depends only on the parameters, the prompts and the step.
    """

    name = "samples"
    optional = True

    def __init__(self, prompts: Sequence[str], length: int, every: int | None):
        self.every = every
        self._prompts = list(dict.fromkeys(prompts))
        self._length = length

    def prepare(self, context: Context) -> bool:
        """Raises `UserError` for a prompt that is too long for the model, and for a tokenizer without text."""
        tokenizer = context.tokenizer
        ids = encode_prompts(self._prompts, self._length, tokenizer, context.seq_len, context.enforce_bos)
        self._tokens, self._lengths = pad_prompts(ids, context.layout.num_batch_shards)
        self._tokenizer = tokenizer
        self._sample = build_batch_sampler(
            context.model, context.layout, context.compute_dtype, SamplingSettings(self._length), context.xla_options
        )
        return True

    def evaluate(self, params: Any, step: int) -> dict[str, str]:
        """The text of each prompt, without the prompt."""
        new = np.asarray(self._sample(params, self._tokens, self._lengths, np.uint32(step)))
        backend, eos_id = self._tokenizer.backend, self._tokenizer.eos_id
        return {
            prompt: backend.decode(until_eos(new[row].tolist(), eos_id)) for row, prompt in enumerate(self._prompts)
        }

    def describe(self, metrics: Mapping[str, float | str]) -> str:
        texts = (f"{prompt!r} -> {str(metrics[prompt])[:_MAX_CHARACTERS]!r}" for prompt in self._prompts)
        return f"samples: {'; '.join(texts)}"


def build(config: EvaluationConfig) -> Samples | None:
    """The evaluator of a run with `sample_prompts`."""
    prompts = config.sample_prompts
    return Samples(prompts, config.sample_length, config.steps_per_eval) if prompts else None
