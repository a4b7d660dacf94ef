"""`lmtrain eval`: the validation loss of a checkpoint or of a Hugging Face model, and its results on benchmarks."""

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmtrain.commands.arguments import Parser, add_checkpoint_flag, add_hf_flag, add_run_flag, parse_run
from lmtrain.config.errors import UserError
from lmtrain.data.caches import Cache
from lmtrain.data.config import DataConfig
from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.models.base_config import FREE
from lmtrain.preprocess.prepare import plan_caches, start_build, wait
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.processes import ALONE
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.train.start.hf_model import config_of, resolve_hf
from lmtrain.train.start.trained_model import TrainedModel, from_checkpoint, from_hf, from_hf_alone

if TYPE_CHECKING:
    from lmtrain.evaluation.run import Findings

# Tokens of a batch on each device, for a model without a config.
_TOKENS_AT_ONCE = 16384
# Resamplings for standard errors, as in lm-eval's command.
_BOOTSTRAP_ITERS = 100_000


def run(argv: list[str]) -> int:
    parser = Parser(
        "eval", "Validation loss of a checkpoint, or with --tasks its results on benchmarks; JSON on standard output."
    )
    add_run_flag(parser)
    add_checkpoint_flag(parser)
    add_hf_flag(parser)
    _add_benchmark_flags(parser)
    arguments, run = parse_run(parser, argv, needs_config=lambda arguments: not (arguments.hf and arguments.tasks))
    harness = _harness(arguments, run.config.eval_harness)
    start_console_log()
    if arguments.hf is None:
        trained = from_checkpoint(resolve_hf(run, arguments.checkpoint), arguments.checkpoint)
    elif arguments.checkpoint is not None:
        raise UserError("--hf and --checkpoint: choose one")
    elif run.loaded.path:
        trained = _from_hf(arguments.hf, run.config)
    else:
        trained = from_hf_alone(arguments.hf)
    with StopRequest("ending the evaluation") as stop:
        try:
            if arguments.tasks is not None:
                found = _evaluate(trained, {}, harness, stop, alone=not run.loaded.path, folder=arguments.output_path)
            else:
                found = _with_text(trained, harness, stop, arguments.output_path)
        except StoppedError:
            return STOPPED_BY_SIGNAL
    for line in found.lines:
        log.info(f"{trained.source}: {line}")
    print(json.dumps({"step": trained.step, **found.metrics}))
    return 0


def _add_benchmark_flags(parser: Parser) -> None:
    parser.add_argument(
        "--tasks", metavar="TASK,...", help="benchmarks of lm-eval to run instead of computing the validation loss"
    )
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="number of examples in each prompt of --tasks")
    parser.add_argument(
        "--max_examples", "--limit", type=int, metavar="N", help="maximum number of examples of each of --tasks"
    )
    parser.add_argument("--include_path", metavar="DIR", help="folder with YAML files of more --tasks")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="write prompts as chats, by the tokenizer's template"
    )
    parser.add_argument(
        "--fewshot_as_multiturn", action="store_true", help="write examples as turns of the conversation"
    )
    parser.add_argument("--log_samples", action="store_true", help="write requests and results to --output_path")
    parser.add_argument(
        "--output_path", metavar="DIR", default=".", help="folder for --log_samples (default: the working folder)"
    )
    parser.add_argument(
        "--confirm_run_unsafe_code", action="store_true", help="allow --tasks that run Python code of their own"
    )


def _harness(arguments: argparse.Namespace, config: EvalHarnessConfig | None) -> EvalHarnessConfig | None:
    """The benchmarks: the config's, changed by the flags. Raises `UserError` for flags without --tasks."""
    given = {
        name: value
        for name in EvalHarnessConfig.model_fields
        if (value := getattr(arguments, name, None)) not in (None, False)
    }
    if arguments.tasks is None:
        if given:
            raise UserError(f"--{next(iter(given))}: requires --tasks")
        return config if config is None else _with_errors(config.model_dump())
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    before: dict[str, Any] = {} if config is None else config.model_dump()
    return _with_errors(before | {"task_spec": names} | given)


def _with_errors(values: dict[str, Any]) -> EvalHarnessConfig:
    """These settings, with standard errors unless `bootstrap_iters` is set."""
    try:
        return EvalHarnessConfig(**values | {"bootstrap_iters": values.get("bootstrap_iters") or _BOOTSTRAP_ITERS})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        flag = {"task_spec": "tasks"}.get(name, name)
        raise UserError(f"--{flag} {first['input']}: {first['msg']}") from None


def _with_text(trained: TrainedModel, harness: EvalHarnessConfig | None, stop: StopRequest, folder: str) -> "Findings":
    """Findings of the evaluation that training does after its last step, with caches that are built if missing."""
    plans = plan_caches(trained.config.data, train=False)
    build = start_build(trained.config, plans, ALONE)
    try:
        wait(build, stop)
        return _evaluate(trained, plans.caches.validation, harness, stop, folder=folder)
    finally:
        build.stop()


def _evaluate(
    trained: TrainedModel,
    caches: Mapping[str, Cache],
    harness: EvalHarnessConfig | None,
    stop: StopRequest,
    alone: bool = False,
    folder: str = "",
) -> "Findings":
    """Findings on the validation sets of `caches`, or of the benchmarks only if there are none.

    `alone`: the model has no config that sets batch sizes. Raises `StoppedError`.
    """
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
    trainer, seq_len = config.trainer, config.model.seq_len
    shards = layout.num_batch_shards
    batch_size = shards * max(1, _TOKENS_AT_ONCE // seq_len) if alone else plan_batching(trainer, shards).eval_batch
    with Progress("eval", 1) as progress:
        context = Context(
            model=model,
            layout=layout,
            compute_dtype=trainer.precision.compute,
            tokenizer=trained.tokenizer,
            sets=open_validation_sets(
                config.data,
                caches,
                layout,
                seq_len=seq_len,
                batch_size=batch_size,
                max_batches=trainer.max_eval_batches,
            ),
            seq_len=seq_len,
            batch_size=batch_size,
            folder=folder,
            xla_options=xla_options(trainer.xla_options, platform_of(layout.mesh.devices.flat[0])),
            check_stop=StopCheck(ALONE, stop),
            progress=lambda done, total, what: progress.update(done, f"{done:,} of {total:,} {what}", total=total),
        )
        if caches:
            always = trainer.model_copy(update={"steps_per_eval": trainer.steps_per_eval or 1})
        else:
            always = trainer.model_copy(update={"steps_per_eval": None, "sample_prompts": []})
        evaluations = Evaluations(build_evaluators(always, harness), context, strict=True)
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
