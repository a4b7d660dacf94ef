"""Compile a training step whose model logs from inside its blocks, as users' models may.

log_and_compile.py FOLDER CONFIG [--SETTING VALUE ...]      for eight H100s; writes FOLDER/train.json
"""

import os
import sys

from lmtrain.config.load import load_config
from lmtrain.plan import worker
from lmtrain.plan.request import Request, Target
from lmtrain.run.config import RunConfig
from lmtrain.runtime.accelerators import find_topology


def main(folder: str, name: str, *flags: str) -> None:
    overrides = [(flag.removeprefix("--"), value) for flag, value in zip(flags[::2], flags[1::2], strict=True)]
    config = load_config(RunConfig, name, overrides).config
    request = Request.of(config, 50257, Target.of(find_topology("h100", devices=8)), ("train",), True)
    os.environ.update(request.target.environment(True))  # before JAX is imported
    import jax.numpy as jnp

    from lmtrain.models.layers.mlp import Mlp
    from lmtrain.tracking.jit_log import jit_log

    call = Mlp.__call__

    def logging(self, x):
        out = call(self, x)
        jit_log({"train/mlp_size": jnp.abs(out)})
        return out

    Mlp.__call__ = logging
    worker.answer(request, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
