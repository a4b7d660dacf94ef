"""A checkpoint saved by commit 24ae231, when the fields of the state had the names of its parts on disk."""

import hashlib
import tarfile
from pathlib import Path

import jax

from lmtrain.checkpoint.discovery import find_checkpoints
from lmtrain.checkpoint.verify import FULL, verify
from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import build_program
from lmtrain.train.start.initial_state import restore_state

VOCAB = 32
CONFIG = {
    "data": {"train_urls": ["none.jsonl"], "tokenizer": "byte"},
    "model": {"type": "gpt2", "hidden_dim": 8, "num_layers": 1, "num_heads": 1, "seq_len": 8},
    "trainer": {"train_batch_size": 1, "model_averaging": {"type": "ema"}, "tracker": {"type": "noop"}},
}
# The hash of parameters, optimizer state and EMA when they were saved.
SHA256 = "e6bf2df72a31f7eee12e0a2aedcda8bfbaba386117aef8bee3732b880e5df981"


def test_every_byte_of_its_state_is_restored(tmp_path):
    with tarfile.open(Path(__file__).parent / "checkpoint_before.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    (checkpoint,) = find_checkpoints(str(tmp_path))
    verify(checkpoint, FULL)
    program = build_program(RunConfig(**CONFIG), VOCAB)
    state = restore_state(checkpoint, program.abstract, program.shardings)
    assert int(state.step) == 7
    arrays = jax.device_get(jax.tree.leaves((state.params, state.opt_state, state.ema_params)))
    assert hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest() == SHA256
