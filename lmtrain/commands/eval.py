"""`lmtrain eval`: the validation loss of a checkpoint or of a Hugging Face model, and its results on benchmarks."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmtrain.commands.arguments import Parser, add_model_flags, at_least, check_model_flags, parse_run
from lmtrain.config.load import first_problem
from lmtrain.data.caches import Cache
from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig, check_benchmarks
from lmtrain.evaluation.config import CoreConfig
from lmtrain.preprocess.prepare import find_caches, start_build, wait
from lmtrain.run.run import require_secrets
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE, log, start_console_log
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.weights.trained_model import TrainedModel, from_checkpoint, from_hf, load_initial

if TYPE_CHECKING:
    from lmtrain.evaluation.interface import Context
    from lmtrain.evaluation.run import Findings
    from lmtrain.models.interface import LanguageModel

# Tokens of a batch on each device, for a model without a config.
_TOKENS_AT_ONCE = 16384
# Resamplings for standard errors, as in lm-eval's command.
_BOOTSTRAP_ITERS = 100_000


def run(argv: list[str]) -> int:
    parser = Parser(
        "eval",
        "Validation loss of a checkpoint, or with --tasks or --core results on benchmarks; JSON on standard output.",
    )
    add_model_flags(parser)
    _add_benchmark_flags(parser)
    arguments, run = parse_run(parser, argv, needs_config=lambda given: not (given.hf and (given.tasks or given.core)))
    require_secrets(run.loaded)
    harness = _harness(arguments, run.config.eval_harness)
    start_console_log()
    if harness is not None:
        check_benchmarks(harness)
    check_model_flags(arguments)
    if arguments.hf is None:
        trained = from_checkpoint(run, arguments.checkpoint, arguments.average)
    else:
        trained = from_hf(arguments.hf, run.config if run.loaded.path else None)
    with StopRequest("ending the evaluation") as stop:
        try:
            if arguments.tasks is None and arguments.core is None:
                findings = _with_text(trained, harness, stop, arguments.output_path)
            else:
                core = None if arguments.core is None else _core(arguments, run.config.trainer.core)
                findings = _evaluate(
                    trained, {}, harness, stop, arguments.output_path, alone=not run.loaded.path, core=core
                )
        except StoppedError:
            return STOPPED_BY_SIGNAL
    for line in findings.lines:
        log.info(f"{trained.source}: {line}")
    print(json.dumps({"step": trained.step, **findings.metrics}))
    return 0


def _add_benchmark_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--tasks", metavar="TASK,...", help="benchmarks of lm-eval to run instead of computing the validation loss")
    add("--core", metavar="DIR", help="run CORE instead, whose tasks are in this folder: see trainer.core.bundle")
    add("--num_fewshot", type=at_least(0), metavar="N", help="number of examples in each prompt of --tasks")
    add("--max_examples", "--limit", type=at_least(1), metavar="N", help="maximum number of examples of each task")
    add("--include_path", metavar="DIR", help="folder with YAML files of more --tasks")
    add("--apply_chat_template", action="store_true", help="write prompts as chats, by the tokenizer's template")
    add("--fewshot_as_multiturn", action="store_true", help="write examples as turns of the conversation")
    add("--log_samples", action="store_true", help="write requests and results to --output_path")
    add("--output_path", metavar="DIR", default=".", help="folder for --log_samples (default: the working folder)")
    add("--confirm_run_unsafe_code", action="store_true", help="allow --tasks that run Python code of their own")


def _harness(arguments: argparse.Namespace, config: EvalHarnessConfig | None) -> EvalHarnessConfig | None:
    """The benchmarks: the config's, changed by the flags. Raises `UserError` for flags without --tasks."""
    given = {
        name: value
        for name in EvalHarnessConfig.model_fields
        if (value := getattr(arguments, name, None)) not in (None, False)
    }
    if arguments.tasks is None:
        if others := given.keys() - (_limit(arguments) if arguments.core is not None else {}).keys():
            raise UserError(f"--{min(others)}: requires --tasks{' or --core' if 'max_examples' in others else ''}")
        return None if config is None or arguments.core is not None else _with_errors(config.model_dump())
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    before: dict[str, Any] = {} if config is None else config.model_dump()
    return _with_errors(before | {"task_spec": names} | given)


def _core(arguments: argparse.Namespace, config: CoreConfig | None) -> CoreConfig:
    """The config's settings, with the flags."""
    before = {} if config is None else config.model_dump()
    return CoreConfig(**before | {"bundle": arguments.core, **_limit(arguments)})


def _limit(arguments: argparse.Namespace) -> dict[str, int]:
    return {} if arguments.max_examples is None else {"max_examples": arguments.max_examples}


def _with_errors(values: dict[str, Any]) -> EvalHarnessConfig:
    """These settings, with standard errors unless `bootstrap_iters` is set."""
    try:
        return EvalHarnessConfig(**values | {"bootstrap_iters": values.get("bootstrap_iters") or _BOOTSTRAP_ITERS})
    except ValidationError as error:
        path, message, value = first_problem(error)
        flag = "tasks" if path[0] == "task_spec" else path[0]
        raise UserError(f"--{flag} {value}: {message}") from None


def _with_text(trained: TrainedModel, harness: EvalHarnessConfig | None, stop: StopRequest, folder: str) -> "Findings":
    """Findings of the evaluation that training does after its last step, with caches that are built if missing."""
    caches = find_caches(trained.config.data, train=False)
    build = start_build(trained.config, caches, ALONE)
    try:
        wait(build, stop)
        return _evaluate(trained, caches.validation, harness, stop, folder)
    finally:
        build.stop()


def _with_reference(
    trained: TrainedModel, model: "LanguageModel", params: Any, caches: Mapping[str, Cache], context: "Context"
) -> "Context":
    """The context of a run that compares answers with a reference: with its log-probabilities in the validation sets.
    A model that is not of the run has no preferences, since these are relative to what a run starts from."""
    from lmtrain.lora.model import BASE, AdaptedModel
    from lmtrain.weights.reference import Reference

    if trained.reference is None:
        log.info(f"{trained.source}: no rewards, which are relative to the model that a run starts from")
        return replace(context, loss=None)
    inner, load = model, partial(load_initial, trained.config, model, context.layout)
    if isinstance(model, AdaptedModel):
        inner, load = model.inner, lambda: params[BASE]
    reference = Reference(
        config=trained.config,
        model=inner,
        layout=context.layout,
        digest=trained.reference,
        load=load,
        xla_options=context.xla_options,
    )
    return reference.checked().add_to(caches, context)


def _evaluate(
    trained: TrainedModel,
    caches: Mapping[str, Cache],
    harness: EvalHarnessConfig | None,
    stop: StopRequest,
    folder: str,
    alone: bool = False,
    core: CoreConfig | None = None,
) -> "Findings":
    """Findings on the validation sets of `caches`, or of the benchmarks `harness` and `core` only if there are none.

    `alone`: the model has no config that sets batch sizes. Raises `StoppedError`.
    """
    from lmtrain.evaluation.interface import Context, open_validation_sets
    from lmtrain.evaluation.run import Evaluations, build_evaluators
    from lmtrain.run.trainer import choose_batching
    from lmtrain.runtime.accelerators import refused_option, xla_options
    from lmtrain.runtime.distributed import StopCheck
    from lmtrain.sharding.mesh import platform_of

    config = trained.config
    model, params, layout = trained.load()
    device = layout.mesh.devices.flat[0]
    trainer, seq_len = config.trainer, config.model.seq_len
    shards = layout.num_batch_shards
    batch_size = shards * max(1, _TOKENS_AT_ONCE // seq_len) if alone else choose_batching(trainer, shards).eval_batch
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
            loss=config.objective.build(config.z_loss_weight) if caches else None,
            seq_len=seq_len,
            batch_size=batch_size,
            folder=folder,
            enforce_bos=config.data.enforce_bos,
            xla_options=xla_options(trainer.xla_options, platform_of(device), device.device_kind),
            check_stop=StopCheck(ALONE, stop),
            progress=lambda done, total, what: progress.update(done, f"{done:,} of {total:,} {what}", total=total),
        )
        if caches and config.objective.needs_reference:
            context = _with_reference(trained, model, params, caches, context)
        if caches:
            always = trainer.model_copy(update={"steps_per_eval": trainer.steps_per_eval or 1})
        else:
            always = trainer.model_copy(update={"steps_per_eval": None, "sample_prompts": [], "core": core})
        evaluations = Evaluations(build_evaluators(always, harness), context, strict=True)
        step = trained.step or 0
        try:
            return evaluations.run(evaluations.due(step, last=step), params, None, step)
        except RuntimeError as error:
            raise refused_option(error) or error from None
