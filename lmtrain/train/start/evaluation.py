"""The context of a run's evaluations, and whether an evaluation is still pending."""

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.data.caches import Caches
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.validation_sets import open_validation_sets
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.objectives.registry import build_objective
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.tracking.open import Trackers
from lmtrain.train.program.program import Program
from lmtrain.train.start.resume import EVALUATION_PENDING


def open_evaluation(
    program: Program, caches: Caches, tokenizer: Tokenizer, folder: str, processes: Processes = ALONE
) -> Context:
    """The validation sets and the rest of the evaluation context. Raises `UserError` for corrupt shards."""
    config = program.config
    return Context(
        model=program.model,
        layout=program.layout,
        compute_dtype=config.trainer.precision.compute,
        tokenizer=tokenizer,
        sets=open_validation_sets(
            config.data,
            caches.validation,
            program.layout,
            seq_len=config.model.seq_len,
            batch_size=program.batching.eval_batch,
            max_batches=config.trainer.max_eval_batches,
        ),
        seq_len=config.model.seq_len,
        batch_size=program.batching.eval_batch,
        processes=processes,
        folder=folder,
        objective=build_objective(config.objective, config.z_loss_weight),
        enforce_bos=config.data.enforce_bos,
        xla_options=program.xla_options,
    )


def is_pending(own: Checkpoint | None, trackers: Trackers, processes: Processes = ALONE) -> bool:
    """Whether a signal ended the evaluation of the checkpoint that a run resumes from. The first process decides."""
    logged = any(name.startswith("eval/") for name in trackers.names)  # all metrics of an evaluation are logged at once
    pending = own is not None and EVALUATION_PENDING in own.read_run_info() and not logged
    return bool(gather(processes, "evaluation pending", pending)[0])
