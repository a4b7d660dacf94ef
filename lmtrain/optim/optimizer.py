"""The optimizer of a config, as one optax transformation."""

from typing import Any

import jax
import optax

from lmtrain.optim.config import AdamConfig, OptimizerConfig
from lmtrain.optim.schedules import Schedule


def build_optimizer(config: OptimizerConfig, schedule: Schedule) -> optax.GradientTransformation:
    """The optimizer of a config, with its learning rate."""
    assert isinstance(config, AdamConfig), "commands refuse what is only planned"
    return _adamw(config, schedule)


def _adamw(config: AdamConfig, schedule: Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019): clip by global norm, Adam, add weight decay, scale by minus the rate."""
    clip = [optax.clip_by_global_norm(config.max_grad_norm)] if config.max_grad_norm else []
    return optax.chain(
        *clip,
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule),
    )


def decay_mask(params: Any) -> Any:
    """True for matrices, false for embeddings, norms and biases: only leaves named `kernel` decay."""

    def is_kernel(path: Any, leaf: Any) -> bool:
        return bool(getattr(path[-1], "key", None) == "kernel")

    return jax.tree_util.tree_map_with_path(is_kernel, params)
