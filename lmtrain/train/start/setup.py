"""Putting a run together, in the order things depend on one another; the result is one frozen record.

1. devices and mesh, 2. batch sizes, 3. data, 4. model and optimizer, 5. the state: restored or fresh, 6. trackers.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.data.batch_sizes import BatchSizes
from lmtrain.data.batches import EvalSource, TrainSource, iterate, too_little
from lmtrain.data.caches import Cache, Caches, describe_epochs, open_store, plan_mixture
from lmtrain.data.token_store import TokenStore
from lmtrain.hf.token_bytes import token_bytes
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.run.config import RunConfig, data_seed, resolved
from lmtrain.run.identity import run_identity
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.run_path import fill_run_id
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import local_rows, place_batch
from lmtrain.tracking.goodput import RESTORE, START_UP, Ledger
from lmtrain.tracking.keep import Keeper
from lmtrain.tracking.open import Trackers, open_trackers
from lmtrain.train.program.layout_table import layout_table
from lmtrain.train.program.program import Program, plan_program
from lmtrain.train.program.work import Work
from lmtrain.train.start.exporter import Exporter
from lmtrain.train.start.initial_state import begin
from lmtrain.train.step.state import TrainState, count_parameters

# Batches read ahead of the step: enough to hide a slow read, little against the model in memory.
_PREFETCH = 8


@dataclass(frozen=True)
class Setup:
    """Everything the loop needs. `folder` is the run's own among the logs; `title` and `facts` say what it is."""

    run: str
    folder: str
    title: str
    facts: dict[str, Any]
    state: TrainState
    first_step: int
    program: Program
    eval_step: Callable[[Any, Any], Any]
    train_batches: Iterator[Any]
    eval_batches: dict[str, Callable[[], Iterator[Any]]]
    checkpointer: Checkpointer
    trackers: Trackers
    keeper: Keeper
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
    ledger: Ledger | None = None,
) -> Setup:
    """Build or restore everything: the run goes on from its `own` checkpoint, or begins, perhaps with `begin_from_hf`.

    Of several `processes` the first tracks and writes exports. `ledger` takes the time that it needs.

    Raises `UserError` for a config that does not fit the machine or the checkpoint.
    """
    trainer = config.trainer
    _use_compilation_cache(trainer.jax_compilation_cache_dir)
    program = plan_program(config, tokenizer.vocab_size)
    model, layout = program.model, program.layout
    seq_len = config.model.seq_len
    stores = [_open_store(config, cache) for cache in caches.train.values()]

    parameters = count_parameters(model)
    log.info(f"{config.model.type}, {parameters:,} parameters, {trainer.precision}")
    for line in layout_table(model, layout, trainer.precision.params):
        log.info(f"  {line}")
    state_bytes = sum(program.state_bytes.values())
    log.info(f"  on each device {format_bytes(state_bytes)} of state; `lmtrain plan` says what a step takes beside it")

    exports = config.hf_save_path is not None or config.hf_upload is not None
    exporter = Exporter(config, run, model, tokenizer, layout, processes.is_first) if exports else None
    run_info = _run_info(config, run, tokenizer.identity, caches, program)
    ledger = ledger or Ledger(None)
    with ledger.timing(START_UP if own is None else RESTORE):
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
        for step, batch in enumerate(iterate(source, first_step, _PREFETCH), start=first_step)
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
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"

    return Setup(
        run=run,
        folder=folder,
        title=f"{run}  {config.model.type}, {parameters:,} parameters, {devices}",
        facts={**run_info["machine"], "devices": devices, "parameters": parameters, "versions": run_info["versions"]},
        state=state,
        first_step=first_step,
        program=program,
        eval_step=program.eval_step(token_bytes(tokenizer)),
        train_batches=train_batches,
        eval_batches=open_eval_batches(config, layout, program.batching.eval_batch, caches.validation),
        checkpointer=checkpointer,
        trackers=trackers,
        keeper=keeper,
        ledger=ledger,
        work=work,
        run_info=run_info,
        batch_sizes=sizes,
        seq_len=seq_len,
        processes=processes,
        exporter=exporter,
    )


def open_eval_batches(
    config: RunConfig, layout: Layout, batch_size: int, caches: Mapping[str, Cache]
) -> dict[str, Callable[[], Iterator[Any]]]:
    """For each validation set a function that reads it from its beginning, in global batches."""
    rows = local_rows(layout.batch, batch_size)
    seq_len = config.model.seq_len

    def reader(cache: Cache) -> Callable[[], Iterator[Any]]:
        store = _open_store(config, cache)
        data, most = config.data, config.trainer.max_eval_batches
        source = EvalSource(store, seq_len, batch_size, rows, most, data.mask_across_documents, data.reset_positions)
        if len(source) < source.whole:
            log.info(
                f"evaluation takes {len(source):,} of {source.whole:,} batches of {cache.folder} "
                "(trainer.max_eval_batches): losses are those of this part"
            )
        return lambda: (place_batch(batch, layout.batch, rows, batch_size) for batch in iterate(source, 0, _PREFETCH))

    return {name: reader(cache) for name, cache in caches.items()}


def _open_store(config: RunConfig, cache: Cache) -> TokenStore:
    """Raises `UserError` if it will never hold one sequence."""
    store = open_store(config.data, cache)
    if store.shards.complete and store.shards.tokens < config.model.seq_len:
        raise too_little(store, config.model.seq_len)
    return store


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
