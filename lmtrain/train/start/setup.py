"""Putting a run together, in the order things depend on one another; the result is one frozen record.

1. devices and mesh, 2. batch sizes, 3. data, 4. model and optimizer, 5. the state: restored or fresh, 6. trackers,
7. evaluations.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.data.batch_sizes import BatchSizes
from lmtrain.data.batches import TrainSource, iterate, open_cache
from lmtrain.data.caches import Caches, describe_epochs, plan_mixture
from lmtrain.evaluation.interface import Context, Evaluator
from lmtrain.evaluation.registry import build_evaluators
from lmtrain.evaluation.validation_sets import open_validation_sets
from lmtrain.hf.export import Origin
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.params import count_parameters
from lmtrain.run.config import RunConfig, data_seed, resolved
from lmtrain.run.identity import run_identity
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.run_path import fill_run_id
from lmtrain.sharding.placement import local_rows, place_batch
from lmtrain.tracking.goodput import Ledger
from lmtrain.tracking.keep import Keeper
from lmtrain.tracking.open import Trackers, open_trackers
from lmtrain.tracking.timer import RESTORE, START_UP, Timer
from lmtrain.train.program.layout_table import layout_table
from lmtrain.train.program.program import Program, plan_program
from lmtrain.train.program.work import Work
from lmtrain.train.start.exporter import Exporter
from lmtrain.train.start.initial_state import begin
from lmtrain.train.step.state import TrainState

# In what a checkpoint says of its run: the evaluation of its step was ended by a signal.
EVALUATION_PENDING = "evaluation_pending"


@dataclass(frozen=True)
class Setup:
    """Everything the loop needs. `folder` is the run's own among the logs; `title` and `facts` say what it is.

    `evaluation_pending` says that the checkpoint which the run was resumed from was not evaluated yet.
    """

    run: str
    folder: str
    title: str
    facts: dict[str, Any]
    state: TrainState
    first_step: int
    program: Program
    train_batches: Iterator[Any]
    evaluators: list[Evaluator]
    evaluation: Context
    evaluation_pending: bool
    checkpointer: Checkpointer
    trackers: Trackers
    keeper: Keeper
    timer: Timer
    ledger: Ledger
    work: Work
    run_info: dict[str, Any]
    batch_sizes: BatchSizes
    seq_len: int
    processes: Processes
    exporter: Exporter | None


def set_up(
    config: RunConfig,
    run: str,
    tokenizer: Tokenizer,
    caches: Caches,
    checkpointer: Checkpointer,
    own: Checkpoint | None = None,
    begin_from_hf: str | None = None,
    processes: Processes = ALONE,
    timer: Timer | None = None,
    ledger: Ledger | None = None,
) -> Setup:
    """Build or restore everything: the run goes on from its `own` checkpoint, or begins, perhaps with `begin_from_hf`.

    Of several `processes` the first tracks and writes exports. `timer` takes the time that it needs.

    Raises `UserError` for a config that does not fit the machine or the checkpoint.
    """
    trainer = config.trainer
    _use_compilation_cache(trainer.jax_compilation_cache_dir)
    program = plan_program(config, tokenizer.vocab_size)
    model, layout = program.model, program.layout
    seq_len = config.model.seq_len
    stores = [open_cache(config.data, cache, seq_len) for cache in caches.train.values()]

    parameters = count_parameters(model)
    log.info(f"{config.model.type}, {parameters:,} parameters, {trainer.precision}")
    for line in layout_table(model, layout, trainer.precision.params):
        log.info(f"  {line}")
    state_bytes = sum(program.state_bytes.values())
    log.info(f"  on each device {format_bytes(state_bytes)} of state; `lmtrain plan` says what a step takes beside it")

    exports = config.hf_save_path is not None or config.hf_upload is not None
    origin = Origin(run, caches.identity)
    exporter = Exporter(config, origin, model, tokenizer, layout, processes.is_first) if exports else None
    run_info = _run_info(config, run, tokenizer.identity, caches, program)
    timer = timer or Timer()
    ledger = ledger or Ledger(None, timer)
    with timer.section(START_UP if own is None else RESTORE):
        state, first_step = begin(program, own, run_info, begin_from_hf, processes)

    sizes = trainer.batch_sizes
    rows = {size: local_rows(layout.batch, size) for size in sizes.all}
    seed = data_seed(config)
    mixture = plan_mixture(config.data, list(caches.train), sizes, seed)
    source = TrainSource(
        stores,
        mixture,
        seq_len,
        sizes,
        rows,
        trainer.num_train_steps,
        config.data.shuffle,
        seed,
        config.data.mask_across_documents,
        config.data.reset_positions,
        None if config.loss_weights is None else [config.loss_weights[name] for name in caches.train],
    )
    for cache, epoch in zip(
        caches.train.values(), describe_epochs(config.data, caches.train, seq_len, sizes), strict=True
    ):
        log.info(f"{epoch}; data: {cache.folder}")
    train_batches = (
        place_batch(batch, layout.batch, rows[sizes.at(step)], sizes.at(step))
        for step, batch in enumerate(iterate(source, first_step), start=first_step)
    )

    log_dir = fill_run_id(trainer.log_dir, run)
    trackers = open_trackers(trainer.tracker, log_dir, run, first_step) if processes.is_first else Trackers()
    trackers.hyperparameters(run_info["config"])
    work = _work(program)
    trackers.summary({"parameter_count": parameters, **_device_facts(work, seq_len)})
    folder = os.path.join(log_dir, run)
    resolved_config = os.path.join(folder, "config.yaml")
    if os.path.exists(resolved_config):
        trackers.artifact(resolved_config, f"{run}-config", "config")
    keeper = Keeper(trainer.tracker if processes.is_first else [], folder, run, trackers)
    pending = own is not None and EVALUATION_PENDING in own.read_run_info() and "eval/loss" not in trackers.names
    evaluation = Context(
        model=model,
        layout=layout,
        compute_dtype=trainer.precision.compute,
        tokenizer=tokenizer,
        sets=open_validation_sets(
            config.data,
            caches.validation,
            layout,
            seq_len=seq_len,
            batch_size=program.batching.eval_batch,
            max_batches=trainer.max_eval_batches,
        ),
        processes=processes,
        folder=folder,
        xla_options=program.xla_options,
    )
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"

    return Setup(
        run=run,
        folder=folder,
        title=f"{run}  {config.model.type}, {parameters:,} parameters, {devices}",
        facts={**run_info["machine"], "devices": devices, "parameters": parameters, "versions": run_info["versions"]},
        state=state,
        first_step=first_step,
        program=program,
        train_batches=train_batches,
        evaluators=build_evaluators(trainer.steps_per_eval),
        evaluation=evaluation,
        evaluation_pending=gather(processes, "evaluation pending", pending)[0],
        checkpointer=checkpointer,
        trackers=trackers,
        keeper=keeper,
        timer=timer,
        ledger=ledger,
        work=work,
        run_info=run_info,
        batch_sizes=sizes,
        seq_len=seq_len,
        processes=processes,
        exporter=exporter,
    )


def _run_info(
    config: RunConfig, run: str, tokenizer: dict[str, Any], caches: Caches, program: Program
) -> dict[str, Any]:
    """What goes into every checkpoint beside the arrays."""
    # with dropout, masks follow from the number of microbatches
    microbatches = {str(size): number for size, number in program.batching.num_microbatches.items()}
    return {
        "run_id": run,
        "identity": run_identity(config, tokenizer, caches.identity),
        "config": resolved(config),
        "machine": {
            "device": jax.devices()[0].device_kind,
            "mesh": dict(program.layout.mesh.shape),
            "microbatches": microbatches,
            "xla_options": program.xla_options,
        },
        "versions": {name: version(name) for name in ("lmtrain", "jax", "flax", "optax", "orbax-checkpoint")},
    }


def _work(program: Program) -> Work:
    """What a token costs and what the devices can do; told in the log."""
    full, causal = program.flops_per_token
    kind = jax.devices()[0].device_kind
    device = find_accelerator(kind)
    if device is None:
        log.info(f"no peak speed is known of {kind}: tokens per second are logged, but no MFU")
        return Work(full, causal, None)
    log.info(
        f"MFU is in percent of {device.peak_flops / 1e12:,.0f} TFLOP/s ({device.name}, dense 16-bit products) on each "
        "device; mfu counts attention in full, mfu_causal half of it"
    )
    return Work(full, causal, device.peak_flops * jax.device_count())


def _device_facts(work: Work, seq_len: int) -> dict[str, Any]:
    """For the trackers' summary; FLOPs are those of forward and backward pass, theoretical ones a second."""
    facts = {
        "throughput/device_kind": jax.devices()[0].device_kind,
        "throughput/device_count": jax.device_count(),
        "throughput/flops_per_example": work.flops_per_token * seq_len,
    }
    if work.peak_flops is not None:
        facts["throughput/theoretical_flops_per_device"] = work.peak_flops / jax.device_count()
        facts["throughput/theoretical_flops"] = work.peak_flops
    return facts


def _use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs, so that the next start compiles nothing."""
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
