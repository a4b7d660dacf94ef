"""Parameters are restored alone, in the dtype they were saved in; with model averaging, their average in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from models.quick import TwoTokenLM

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.checkpoint.discovery import find_checkpoints
from lmtrain.models.params import abstract_params
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.load_checkpoint import restore_params

MODEL = TwoTokenLM(8, 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("averaging", [None, {"beta": 0.9}])
def test_parameters_are_restored_alone_in_their_saved_dtype(tmp_path, dtype, averaging):
    rng = np.random.default_rng(0)
    shapes = meta.unbox(abstract_params(MODEL))
    params, average = (
        jax.tree.map(lambda leaf, kind=kind: jnp.asarray(rng.normal(size=leaf.shape), kind), shapes)
        for kind in (dtype, "float32")
    )
    checkpointer = Checkpointer(str(tmp_path), CheckpointerConfig())
    info = {"config": {"trainer": {"mp": f"p={dtype},c=float32", "model_averaging": averaging}}}
    checkpointer.save(7, Kind.PERMANENT, {"params": params, "average": average}, info)
    checkpointer.close()
    restored = restore_params(find_checkpoints(str(tmp_path))[-1], MODEL, build_layout(PartitioningConfig()))
    for leaf, expected in zip(
        jax.tree.leaves(restored), jax.tree.leaves(average if averaging else params), strict=True
    ):
        assert leaf.dtype == expected.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()
