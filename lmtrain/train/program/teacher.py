"""The frozen teacher of a distillation: its model, before any arrays exist."""

from dataclasses import dataclass

from lmtrain.config.errors import UserError, errors_of
from lmtrain.hf.weight_files import read_model_config
from lmtrain.models.attention.choose import choose_attention
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.registry import build_model
from lmtrain.objectives.config import DistillConfig
from lmtrain.run.config import RunConfig
from lmtrain.weights.hf_config import config_of

# Settings of the student that are about execution, and the length of sequences, hold for the teacher, too.
_SHARED = ("seq_len", "attn_backend", "flash_attention_block_size", "pad_vocab_to_multiple_of", "scan_layers")


@dataclass(frozen=True)
class Teacher:
    """The teacher `ref`, a folder or hub id. Its head has as many rows as that of the student."""

    ref: str
    config: ModelConfig
    model: LanguageModel


def build_teacher(config: RunConfig, vocab_size: int, platform: str, device_kind: str) -> Teacher | None:
    """The teacher of a run on devices of this kind; None without one.

    Raises `UserError` for one with a shorter context or a smaller vocabulary.
    """
    if not isinstance(config.objective, DistillConfig):
        return None
    ref, length = config.objective.teacher, config.model.seq_len
    with errors_of("objective.teacher"):
        theirs = config_of(ref).model
        tokens = read_model_config(ref).get("vocab_size")
        if theirs.seq_len < length:
            raise UserError(f"{ref} has a context of {theirs.seq_len:,} tokens, but model.seq_len is {length:,}")
        if isinstance(tokens, int) and tokens < vocab_size:
            raise UserError(
                f"{ref} has {tokens:,} tokens, but the run's tokenizer {vocab_size:,}; both must be the same"
            )
    own = {name: getattr(config.model, name) for name in _SHARED}
    theirs = theirs.model_copy(update=own | {"gradient_checkpointing": False})
    needs = config.model_copy(update={"model": theirs}).attention_needs(trains=False)
    attention = choose_attention(needs, platform, device_kind)
    return Teacher(ref, theirs, build_model(theirs, vocab_size, attention.name))
