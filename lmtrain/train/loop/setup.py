"""What the training loop needs, put together in the order of dependency: program, data, state, reporting."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.data.caches import Caches
from lmtrain.data.verification import verify_in_background
from lmtrain.evaluation.interface import Context
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.lora.model import BASE, fingerprint
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run, run_identity
from lmtrain.runtime.logging import Processes
from lmtrain.runtime.storage import is_url
from lmtrain.tracking.goodput import RESTORE, START_UP, Ledger, Timer
from lmtrain.train.loop.saver import Decisions, Saver
from lmtrain.train.program.program import Program, build_program
from lmtrain.train.start.initial_state import begin
from lmtrain.train.start.reference import add_reference, load_frozen, reference_before_state, reference_of
from lmtrain.train.start.reporting import Reporting, describe_run, log_program, open_reporting
from lmtrain.train.start.resume import DECISIONS, check_identity
from lmtrain.train.start.train_batches import TrainBatches, is_pending, open_evaluation
from lmtrain.train.step.state import TrainState
from lmtrain.weights.hf_config import hf_ref
from lmtrain.weights.run_files import generation_of, keep_config, keep_tokenizer, template_of
from lmtrain.weights.trained_model import REFERENCE

if TYPE_CHECKING:
    from lmtrain.train.start.exporter import Exporter


@dataclass(frozen=True)
class Start:
    """The `state` after `step` updates that a run starts from; whether its evaluation is still to be done."""

    state: TrainState
    step: int
    evaluation_pending: bool = False


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that is ready to train from `start`, with its `batches` from that step on."""

    program: Program
    start: Start
    batches: Iterator[Any]
    evaluation: Context
    saver: Saver
    reporting: Reporting


def set_up(
    run: Run,
    config: RunConfig,
    caches: Caches,
    tokenizer: Tokenizer,
    checkpointer: Checkpointer,
    own: Checkpoint | None,
    processes: Processes,
    began: float,
) -> Setup:
    """Set up `run` with its resolved `config`. `own` is the checkpoint that it resumes from.

    `began` is the start time of the process, in seconds since 1970. Raises `UserError` for what cannot be trained.
    """
    timer = Timer()
    ledger = Ledger(run.logs if processes.is_first else None, timer, began)
    ledger.write()  # records a start that fails before its first step too
    saved = {} if own is None else own.read_run_info()

    program = _build_program(config, tokenizer)
    batches = _open_batches(config, caches, program, processes)
    evaluation = open_evaluation(program, caches, tokenizer, run.logs, processes)
    exporter = _open_exporter(run, config, caches, program, tokenizer, processes)
    with timer.section(START_UP if own is None else RESTORE):
        if own is not None and config.lora is not None:  # first: another base_dtype would look like another base
            check_identity(own, run_identity(config, tokenizer.identity, caches.identity))
        frozen = load_frozen(program, tokenizer.identity, saved, processes)
        if exporter is not None and BASE in frozen:
            exporter.set_base(frozen[BASE].identity)
        run_info = describe_run(config, run.id, tokenizer.identity, caches, program, frozen)
        needed, reference = config.objective.needs_reference, None
        if needed and (reference := reference_before_state(program, frozen, saved, processes)):
            evaluation = add_reference(reference, caches, batches, evaluation)
        state, step = begin(program, own, run_info, hf_ref(config), processes, frozen)
        if needed and reference is None:
            digest = fingerprint(state.params, program.layout)
            reference = reference_of(program, digest, partial(getattr, state, "params"), processes)
            evaluation = add_reference(reference, caches, batches, evaluation)
        if reference is not None:
            run_info |= {REFERENCE: reference.digest}
    write_files = partial(_write_files, run, tokenizer, saved)
    if processes.is_first:
        keep_config(run)  # not before: the config of a refused start is not the run's
    reporting = open_reporting(run, program, run_info, step, timer, ledger, processes, write_files)
    decisions = Decisions(config.trainer.checkpointer.keep_best, config.trainer.early_stopping, saved.get(DECISIONS))
    return Setup(
        program=program,
        start=Start(state, step, is_pending(own, reporting.trackers, processes)),
        batches=batches.after(step),
        evaluation=evaluation,
        saver=Saver(checkpointer, exporter, run_info, decisions, reporting.trackers, timer),
        reporting=reporting,
    )


def _build_program(config: RunConfig, tokenizer: Tokenizer) -> Program:
    """What each device computes and holds. Settings that do not fit are refused before the state exists."""
    program = build_program(config, tokenizer.vocab_size)
    log_program(program)
    program.check_products_pay()
    program.memory_use.check_fits()
    return program


def _open_batches(config: RunConfig, caches: Caches, program: Program, processes: Processes) -> TrainBatches:
    """The training batches; the files of all caches are verified in the background."""
    batches = TrainBatches(config, caches, program.layout)
    for cache in [*caches.train.values(), *caches.validation.values()] if processes.is_first else []:
        if not is_url(cache.folder):
            verify_in_background(cache.folder, cache.shards)
    return batches


def _write_files(run: Run, tokenizer: Tokenizer, saved: Mapping[str, Any]) -> None:
    """Write the files of the run that exports and samples need. `saved` is the run info that it resumes from."""
    keep_config(run)
    if not saved or saved["identity"]["tokenizer"] == tokenizer.identity:
        keep_tokenizer(run, tokenizer)


def _open_exporter(
    run: Run, config: RunConfig, caches: Caches, program: Program, tokenizer: Tokenizer, processes: Processes
) -> "Exporter | None":
    if config.hf_save_path is None and config.hf_upload is None:
        return None
    from lmtrain.train.start.exporter import Exporter
    from lmtrain.weights.export_folder import ModelOrigin

    origin, template = ModelOrigin(run.id, caches.identity), template_of(run, tokenizer)
    return Exporter(config, origin, program.model, tokenizer, program.layout, processes, template, generation_of(run))
