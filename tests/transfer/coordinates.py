"""How far ten steps move the logits of a model, at several widths: the coordinate check of muP.

With transfer the change is the same at every width, and without it grows with the width.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from lmtrain.models.params import initializer, parameter_axes
from lmtrain.models.registry import build_model
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.run.config import RunConfig
from lmtrain.transfer.factors import factor_trees

VOCAB, BATCH, LENGTH, STEPS, BASE = 16, 16, 32, 10, 64
RATES = {"adam": 2**-10, "lion": 2**-12, "muon": 2**-7}
# Without transfer, wide models of these families learn the text within the ten steps at twice the rate.
SLOWER = {("gpt2", "adam"): 2**-11, ("backpack", "adam"): 2**-11}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "qk_norm": "head"}),
    "gpt2": ("gpt2", {}),
    "mpt": ("mpt", {"init_scheme": "normal"}),
    "backpack": ("backpack", {}),
    "mixture": ("llama", {"moe": {"num_experts": 4, "shared_experts": 1}}),
}


def rate_of(family, optimizer):
    """The learning rate of the check."""
    return SLOWER.get((family, optimizer), RATES[optimizer])


def slope(family, optimizer, rate, transfer, widths, **model):
    """The exponent of the width with which the change of the logits grows, over `widths`.

    The vocabulary is small, since the table's initial values add to the change a part that is random, and that falls
    with the root of the width over the vocabulary.
    """
    changes = [_change(_config(family, width, optimizer, transfer, model), rate) for width in widths]
    return float(np.polyfit(np.log2(widths), np.log2(changes), 1)[0])


def _sizes(family, width, model):
    sizes = {"hidden_dim": width, "num_heads": width // 16, "num_layers": 2}
    if family == "llama":
        sizes |= {"intermediate_dim": 2 * width}
    return sizes | ({"moe": {"intermediate_dim": width}} if "moe" in model else {})


def _config(family, width, optimizer, transfer, model):
    sizes = _sizes(family, width, model)
    moe = {"moe": model["moe"] | sizes["moe"]} if "moe" in model else {}
    settings = {"type": family, "seq_len": LENGTH, "gradient_checkpointing": False, **model, **sizes, **moe}
    transferred = {"transfer": {"base": _sizes(family, BASE, model)}} if transfer else {}
    return RunConfig(model=settings, optimizer=optimizer, **transferred)


def _change(config, rate):
    model = build_model(config.model, VOCAB)
    factors = factor_trees(config.transfer, config.model, config.optimizer)
    params = nn.meta.unbox(initializer(model)(jax.random.key(0)))
    if factors is not None:
        params = jax.tree.map(
            lambda p, factor, offset: p * factor + offset, params, factors["initial"], factors["offset"]
        )
    optimizer = build_optimizer(config.optimizer, lambda step: rate, parameter_axes(model), factors)
    logits = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))

    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            found = logits(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(found, tokens[:, 1:]).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    *batches, last = _batches()
    state, trained = optimizer.init(params), params
    for tokens in batches:
        trained, state = step(trained, state, tokens)
    return jnp.std(logits(trained, last[:, 1:]) - logits(params, last[:, 1:]))


def _batches():
    """Batches of a Markov chain, of which a model learns something in ten steps."""
    rng = np.random.default_rng(0)
    chain = rng.dirichlet(np.full(VOCAB, 0.1), VOCAB).cumsum(1)
    tokens = rng.integers(0, VOCAB, (STEPS + 1, BATCH, LENGTH + 1))
    for n in range(LENGTH):
        drawn = rng.random((STEPS + 1, BATCH, 1))
        tokens[..., n + 1] = (chain[tokens[..., n]] < drawn).sum(-1).clip(0, VOCAB - 1)
    return jnp.asarray(tokens)
