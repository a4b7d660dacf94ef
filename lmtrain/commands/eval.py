"""`lmtrain eval CONFIG`: the validation loss of a checkpoint, or of a Hugging Face model, on the config's data."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmtrain.commands.arguments import Parser, add_checkpoint_flag, add_hf_flag, add_run_flag, parse_run
from lmtrain.config.errors import UserError
from lmtrain.data.caches import Cache
from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.models.base_config import FREE
from lmtrain.preprocess.prepare import plan_caches, start_build, wait
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.processes import ALONE
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.train.start.hf_model import config_of, resolve_hf
from lmtrain.train.start.trained_model import TrainedModel, from_checkpoint, from_hf

if TYPE_CHECKING:
    from lmtrain.evaluation.run import Findings


def run(argv: list[str]) -> int:
    parser = Parser("eval", "Validation loss of a checkpoint; the result goes to standard output as JSON.")
    add_run_flag(parser)
    add_checkpoint_flag(parser)
    add_hf_flag(parser)
    arguments, run = parse_run(parser, argv)
    start_console_log()
    if arguments.hf is None:
        trained = from_checkpoint(resolve_hf(run, arguments.checkpoint), arguments.checkpoint)
    elif arguments.checkpoint is not None:
        raise UserError("--hf and --checkpoint: choose one")
    else:
        trained = _from_hf(arguments.hf, run.config)
    config = trained.config
    plans = plan_caches(config.data, train=False)
    with StopRequest("ending the evaluation") as stop:
        build = start_build(config, plans, ALONE)
        try:
            wait(build, stop)
            found = _evaluate(trained, plans.caches.validation, stop)
        except StoppedError:
            return STOPPED_BY_SIGNAL
        finally:
            build.stop()
    for line in found.lines:
        log.info(f"{trained.source}: {line}")
    print(json.dumps({"step": trained.step, **found.metrics}))
    return 0


def _evaluate(trained: TrainedModel, caches: Mapping[str, Cache], stop: StopRequest) -> "Findings":
    """Findings of the evaluation that training does after its last step. Raises `StoppedError`."""
    from lmtrain.evaluation.interface import Context
    from lmtrain.evaluation.registry import build_evaluators
    from lmtrain.evaluation.run import Evaluations
    from lmtrain.evaluation.validation_sets import open_validation_sets
    from lmtrain.sharding.mesh import platform_of
    from lmtrain.train.program.batching import plan_batching
    from lmtrain.train.program.xla_options import refused_option, xla_options
    from lmtrain.train.step.agreement import StopCheck

    config = trained.config
    model, params, layout = trained.load()
    trainer = config.trainer
    progress = Progress("eval", 0, bar=False)
    context = Context(
        model=model,
        layout=layout,
        compute_dtype=trainer.precision.compute,
        tokenizer=trained.tokenizer,
        sets=open_validation_sets(
            config.data,
            caches,
            layout,
            seq_len=config.model.seq_len,
            batch_size=plan_batching(trainer, layout.num_batch_shards).eval_batch,
            max_batches=trainer.max_eval_batches,
        ),
        seq_len=config.model.seq_len,
        xla_options=xla_options(trainer.xla_options, platform_of(layout.mesh.devices.flat[0])),
        check_stop=StopCheck(ALONE, stop),
        progress=lambda done, total: progress.say_rarely(f"{done:,} of {total:,} batches"),
    )
    always = trainer.model_copy(update={"steps_per_eval": trainer.steps_per_eval or 1})
    evaluations = Evaluations(build_evaluators(always), context)
    step = trained.step or 0
    try:
        return evaluations.run(evaluations.due(step, last=step), params, None, step)
    except RuntimeError as error:
        raise refused_option(error) or error from None


def _from_hf(ref: str, config: RunConfig) -> TrainedModel:
    """The model `ref` with the config's data, and the config's model settings that do not change what the weights mean.

    Raises `UserError` if the data's tokenizer gives other token ids than the model's own.
    """
    alone = config_of(ref)
    given = config.model.model_fields_set & FREE & type(alone.model).model_fields.keys()
    model = alone.model.model_copy(update={name: getattr(config.model, name) for name in given})
    data = config.data
    if "tokenizer" not in data.model_fields_set:
        data = data.model_copy(update={"tokenizer": ref})
    elif "tokenizer" in alone.data.model_fields_set and not _same_tokens(data, ref):
        raise UserError(
            f"data.tokenizer: {data.tokenizer} gives other tokens than {ref} was trained on; set "
            f"data.tokenizer: {ref}, and a cache_dir for it"
        )
    return from_hf(ref, config.model_copy(update={"model": model, "data": data}))


def _same_tokens(data: DataConfig, ref: str) -> bool:
    return open_tokenizer(data.tokenizer, data.vocab_size).identity == open_tokenizer(ref).identity
