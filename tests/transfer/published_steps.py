"""A script: published_steps.py OUTPUT (tied | untied). Eight steps of a Llama with published multipliers, and with
their folded form; writes the losses of both.

The published numbers are written here as in table 1 of Dey et al. 2025 and the authors' code (EleutherAI/nanoGPT-mup,
branch completep), not computed by lmtrain."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

from lmtrain.models.params import flatten, initializer, unflatten  # noqa: E402
from lmtrain.models.registry import build_model  # noqa: E402
from lmtrain.optim.optimizer import build_optimizer  # noqa: E402
from lmtrain.run.config import RunConfig  # noqa: E402
from lmtrain.transfer.factors import factor_trees  # noqa: E402

VOCAB, RATE, DECAY, STEPS = 64, 2.0**-6, 0.125, 8
WIDTH, DEPTH, MLP = 4.0, 2.0, 16.0
ADAM = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-3}  # large enough to matter
BASE = {"hidden_dim": 16, "num_heads": 2, "num_layers": 1, "intermediate_dim": 8}
MODEL = {"type": "llama", "hidden_dim": 64, "num_heads": 8, "num_layers": 2, "intermediate_dim": 128, "seq_len": 8}


def published(path, tied):
    """The multiplier, and initial values, rate and epsilon relative to the base. The code's epsilon is divided by the
    width everywhere; by the depth, as the table says, in the blocks. Inputs of `down` have a ratio of their own, which
    is in its initial values and rate; in the publication it is that of the widths."""
    name = path.split("/")[-2]
    if path == "tokens/embedding":
        return 1.0, 1.0, 1.0, 1 / WIDTH
    if path == "unembed/embedding":
        return 1 / WIDTH, 1.0, 1.0, 1 / WIDTH
    if name == "norm_final":  # a multiplier of the logits, where the table is the embeddings' too
        return (1 / WIDTH if tied else 1.0), 1.0, 1.0, 1 / WIDTH
    if name.startswith("norm"):
        return 1.0, 1.0, 1.0, 1 / (WIDTH * DEPTH)
    inputs = MLP if name == "down" else WIDTH
    return (1 / DEPTH if name in ("out", "down") else 1.0), inputs**-0.5, 1 / inputs, 1 / (WIDTH * DEPTH)


def run(tied):
    settings = {"model": MODEL | {"tie_word_embeddings": tied}, "transfer": {"base": BASE}}
    optimizer = {"type": "adam", "max_grad_norm": 0.5, "weight_decay": DECAY, **ADAM}
    config = RunConfig.model_validate(settings | {"optimizer": optimizer})
    model = build_model(config.model, VOCAB)
    trees = factor_trees(config.transfer, config.model, config.optimizer)
    boxed = jax.tree.map(lambda x: x.astype(jnp.float64), initializer(model)(jax.random.key(0)))
    new = flatten(jax.tree.map(lambda box: box.value, boxed, is_leaf=lambda node: hasattr(node, "names")))
    factors = {name: flatten(tree) for name, tree in trees.items()}
    folded = {path: new[path] * factors["initial"][path] for path in new}
    rows = {path: published(path, tied) for path in new}
    own = {path: new[path] * rows[path][1] for path in new}

    def loss(params, tokens):
        logits = model.apply({"params": unflatten(params)}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    ours = build_optimizer(config.optimizer, lambda count: RATE, None, trees)
    clip = optax.clip_by_global_norm(0.5)
    each = {path: optax.scale_by_adam(0.9, 0.95, ADAM["epsilon"] * row[3]) for path, row in rows.items()}

    # one program for both: compiled twice, it could be fused and rounded differently
    gradient_of = jax.jit(jax.value_and_grad(loss))

    def our_step(params, state, tokens):
        value, gradients = gradient_of(flatten(params), tokens)
        updates, state = ours.update(unflatten(gradients), state, params)
        return optax.apply_updates(params, updates), state, value

    def their_step(params, states, tokens):
        value, gradients = gradient_of({path: params[path] * rows[path][0] for path in params}, tokens)
        gradients = {path: gradients[path] * rows[path][0] for path in params}  # the chain rule
        gradients, _ = clip.update(gradients, clip.init(params))
        after, states_after = {}, {}
        for path, transformation in each.items():
            update, states_after[path] = transformation.update(gradients[path], states[path])
            decay = DECAY * RATE * params[path] if path.endswith("kernel") else 0.0
            after[path] = params[path] - (RATE * rows[path][2] * update + decay)
        return after, states_after, value

    tree, state = unflatten(folded), ours.init(unflatten(folded))
    theirs, states = own, {path: transformation.init(own[path]) for path, transformation in each.items()}
    rng, found = np.random.default_rng(0), ([], [])
    for _ in range(STEPS):
        tokens = jnp.asarray(rng.integers(0, VOCAB, (4, 9)))
        tree, state, value = our_step(tree, state, tokens)
        theirs, states, expected = their_step(theirs, states, tokens)
        found[0].append(float(value))
        found[1].append(float(expected))
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump(run(sys.argv[2] == "tied"), file)
    os._exit(0)
