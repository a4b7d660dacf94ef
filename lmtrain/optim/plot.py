"""Plot of the learning rate over a run: `lmtrain config show CONFIG --plot-lr out.png`."""

import os

from lmtrain.config.errors import UserError
from lmtrain.optim.config import OptimizerConfig

_MAX_POINTS = 5000


def plot_learning_rate(config: OptimizerConfig, steps: int, path: str) -> None:
    """Write a plot in the format of the file's extension. Raises `UserError` if it cannot be written."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from matplotlib.figure import Figure

    from lmtrain.optim.schedules import build_schedule

    at = np.unique(np.linspace(0, steps - 1, min(steps, _MAX_POINTS)).astype(np.int32))
    rates = jax.vmap(build_schedule(config, steps))(jnp.asarray(at))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(at, np.asarray(rates))
    axes.set(xlabel="step", ylabel="learning rate", title=f"{config.type}, {config.lr_schedule}")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(os.path.expanduser(path))
    except (OSError, ValueError) as error:  # missing folder, unsupported extension
        raise UserError(f"--plot-lr {path}: {error}") from None
