"""Description of a run for its log and its checkpoints."""

from importlib.metadata import version
from typing import Any

import jax

from lmtrain.config.redact import redact
from lmtrain.data.caches import Caches
from lmtrain.models.params import count_parameters
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.identity import run_identity
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import format_bytes
from lmtrain.sharding.axes import used_axes
from lmtrain.train.program.layout_table import layout_table
from lmtrain.train.program.program import Program
from lmtrain.weights.lora_base import BASE, LoraBase


def log_program(program: Program) -> None:
    """Log the model, the layout of its parameters, and the memory of the training state."""
    config, model = program.config, program.model
    trained = ""
    if program.abstract.base is not None:
        trained = f", of which LoRA trains {sum(leaf.size for leaf in jax.tree.leaves(program.abstract.params)):,}"
    log.info(f"{config.model.type}, {count_parameters(model):,} parameters{trained}, {config.trainer.precision}")
    if config.trainer.precision.products and program.products and not program.experts_in_8_bits:
        log.info(
            f"  products of experts ({program.products.name}) have no 8 bits in {config.trainer.precision.products}"
        )
    moe = getattr(config.model, "moe", None)
    if moe is not None:
        log.info(
            f"  losses added for the routers: model.moe.aux_loss {moe.aux_loss:g}, model.moe.z_loss {moe.z_loss:g}"
        )
    for line in layout_table(model, program.layout, program.abstract.with_base(program.abstract.params)):
        log.info(f"  {line}")
    state = format_bytes(sum(program.state_bytes.values()))
    log.info(f"  training state: {state} per device; `lmtrain plan` compiles the step for its peak memory")
    if config.trainer.precision.params == "bfloat16":
        log.warning(
            "trainer.mp: parameters are stored in bfloat16: an update of less than 1/512 of a parameter is rounded "
            "away; p=f32,c=bfloat16 stores them in float32"
        )
    if config.objective.needs_reference and program.model.has_dropout:
        log.warning(
            f"objective {config.objective.type}: the model has dropout in training, its reference has none; set "
            "model.resid_pdrop, embed_pdrop and attn_pdrop, and lora.dropout, to 0.0, as TRL does"
        )


def describe_run(
    config: RunConfig,
    run: str,
    tokenizer: dict[str, Any],
    caches: Caches,
    program: Program,
    base: LoraBase | None = None,
) -> dict[str, Any]:
    """The run info that is stored in every checkpoint next to the arrays. `base` of a run with LoRA."""
    # with dropout, the masks depend on the number of microbatches
    microbatches = {str(size): number for size, number in program.batching.num_microbatches.items()}
    return {
        "run_id": run,
        "identity": run_identity(config, tokenizer, caches.identity),
        "config": resolved(config),
        "machine": {
            "device": jax.devices()[0].device_kind,
            # as in checkpoints from before there were more axes
            "mesh": used_axes(program.layout.mesh.shape),
            "microbatches": microbatches,
            "xla_options": program.xla_options,
        },
        **({} if base is None else {BASE: redact(base.run_info)}),
        "versions": {name: version(name) for name in ("lmtrain", "jax", "flax", "optax", "orbax-checkpoint")},
    }
