"""Any number of microbatches gives the same loss and gradients; each has every n-th row and its own key."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import quick

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.registry import build_model
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.step.microbatches import sum_over_microbatches
from lmtrain.train.step.state import TrainState, state_shardings
from lmtrain.train.step.step import build_train_step

VOCAB = 19
SIZES = {"hidden_dim": 8, "num_heads": 2, "num_layers": 1, "seq_len": 6, "gradient_checkpointing": False}
MODELS = {
    "two tokens": quick.TwoTokenLM(8, VOCAB),
    "gpt2": build_model(Gpt2Config(**SIZES), VOCAB),
    "llama": build_model(LlamaConfig(**SIZES, intermediate_dim=12, num_kv_heads=1), VOCAB),
}
LONG = ("gpt2", "llama")  # test_step.py has a GPT-2 in the suite
LAYOUT = plan_layout(PartitioningConfig())
# an optimizer that stores the gradients in its state, so that tests see them without the rounding of an update
KEEPER = optax.chain(optax.trace(0.0), optax.scale(0.0))
RNG = np.random.default_rng(0)
BATCH = {
    "tokens": RNG.integers(0, VOCAB, (8, 6)).astype(np.int32),
    # rows of 5, 5, 4, 1, 0, 3, 0 and 1 targets: no two microbatches have equally many
    "loss_mask": np.arange(6) < np.array([[5], [5], [4], [1], [0], [3], [0], [1]]),
    "segments": np.cumsum(RNG.random((8, 6)) < 0.2, axis=1).astype(np.int32),
}


def fresh(model) -> TrainState:
    params = jax.tree.map(jnp.asarray, quick.random_params(model, 0.3))
    return TrainState(jnp.int32(0), params, KEEPER.init(params))


def loss_and_gradients(family: str, microbatches: int):
    model = MODELS[family]
    _, shardings = state_shardings(model, KEEPER, LAYOUT, "float32")
    step = build_train_step(
        model,
        KEEPER,
        lambda step: 0.0,
        LAYOUT,
        shardings,
        seed=0,
        compute_dtype="float32",
        num_microbatches={8: microbatches},
        dropout=False,
        objective=CrossEntropy(),
    )
    state = fresh(model)
    state, metrics, _ = step(state, BATCH)
    return float(metrics["train/loss"]), state.opt_state[0].trace


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in MODELS]
)
def whole(request):
    return request.param, *loss_and_gradients(request.param, 1)


def test_the_number_of_microbatches_changes_neither_loss_nor_gradients(whole):
    family, loss, gradients = whole
    assert loss > 0
    for number in (2, 4, 8):
        other_loss, other = loss_and_gradients(family, number)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        leaves = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(other), strict=True)
        for (path, expected), found in leaves:
            largest = np.abs(expected).max()
            assert largest > 0, path
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest, err_msg=f"{number} {path}")


def parts_of(number: int, rows: int = 8):
    """(rows, key) of each microbatch in the order of computing, and the sum of the rows."""
    seen = []

    def function(micro, key):
        def note(rows, data):
            seen.append((rows.tolist(), tuple(data.tolist())))

        jax.debug.callback(note, micro["row"], jax.random.key_data(key), ordered=True)
        return {"sum": micro["row"].sum().astype(jnp.float32)}

    batch = {"row": jnp.arange(rows), "wide": jnp.zeros((rows, 3))}
    total = jax.jit(lambda: sum_over_microbatches(function, batch, jax.random.key(3), number))()
    jax.effects_barrier()
    return seen, float(total["sum"])


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_each_microbatch_has_every_nth_row(number):
    seen, total = parts_of(number)
    assert [rows for rows, _ in seen] == [list(range(first, 8, number)) for first in range(number)]
    assert total == sum(range(8))


def test_each_microbatch_has_its_own_key_which_is_the_same_at_each_call():
    keys = [key for _, key in parts_of(4)[0]]
    assert len(set(keys)) == 4
    assert [key for _, key in parts_of(4)[0]] == keys


def test_several_bfloat16_microbatches_are_summed_in_float32():
    """The sum of 257 ones: in bfloat16, 256 + 1 is 256."""

    def function(micro, key):
        return micro.sum(dtype=jnp.bfloat16)

    total = jax.jit(lambda x: sum_over_microbatches(function, x, jax.random.key(0), 257))(jnp.ones(257, jnp.bfloat16))
    assert total.dtype == jnp.float32
    assert float(total) == 257
