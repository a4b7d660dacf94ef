"""`lmtrain config check|show|schema`: validate a config, print it resolved, or print its JSON Schema."""

import importlib
import json
import sys

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.describe import show, without_defaults
from lmtrain.config.spellings import build_schema
from lmtrain.run.config import RunConfig, check_evaluation, may_validate, resolved, without_effect
from lmtrain.run.run import Run, require_secrets, resolve
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import redact


def run(argv: list[str]) -> int:
    actions = {"check": _check, "show": _show, "schema": _schema}
    if argv and argv[0] in ("-h", "--help"):
        print(
            "usage: lmtrain config check CONFIG [--section.field VALUE ...]\n"
            "       lmtrain config show CONFIG [--changed] [--resolved] [--plot-lr FILE] [--section.field VALUE ...]\n"
            "       lmtrain config schema"
        )
        return 0
    if not argv or argv[0] not in actions:
        raise UserError(f"lmtrain config: expected one of: {', '.join(actions)}")
    return actions[argv[0]](argv[1:])


def _check(argv: list[str]) -> int:
    _, run = parse_run(Parser("config check", "Validate a config without running anything."), argv)
    require_secrets(run.loaded, trains=True)
    check_evaluation(run.config, may_validate(run.config) and run.config.trainer.evaluates)
    _check_export(run.config)
    for path, text in without_effect(run.config).items():
        origin = run.loaded.tree.origin_of(path)
        place = f"{origin}: " if origin is not None and origin.line is not None else ""
        print(f"note: {place}{text}", file=sys.stderr)
    if not any(source.has_train or source.demo for source in run.config.data.sources().values()):
        print("note: data.train_urls: no text for training, which `lmtrain train` requires", file=sys.stderr)
    print(f"{redact(run.loaded.path)}: ok, run id {run.id}")
    return 0


def _check_export(config: RunConfig) -> None:
    """Raise `UserError` if the run exports a model that transformers does not have; a model from there it has."""
    exports = config.hf_save_path is not None or config.hf_upload is not None
    if exports and config.lora is None and not config.use_hf_model_config:
        family = importlib.import_module(f"lmtrain.models.{config.model.type}.hf")  # without JAX, as this command
        family.to_hf_config(config.model, 1, None, None)


def _show(argv: list[str]) -> int:
    parser = Parser("config show", "Print all settings of a config, each with its origin.")
    parser.add_argument(
        "--resolved",
        action="store_true",
        help="resolve as a run does: sizes and tokenizer of initialize_from_hf, steps of an epoch of tokenized data, "
        "replicas over slices with this machine's devices; with the factors of transfer for each parameter",
    )
    parser.add_argument("--changed", action="store_true", help="only what a file or the command line sets")
    parser.add_argument(
        "--plot-lr", metavar="FILE", help="plot the learning rate over the run to FILE instead (png, svg, pdf)"
    )
    arguments, run = parse_run(parser, argv)
    if arguments.resolved:
        run = _resolved(run)
        if run.config.trainer.replica_dcn_axis_size == "auto":
            from lmtrain.train.start.checks import resolve_replicas

            try:
                run = resolve_replicas(run)
            except UserError as error:
                print(f"note: replica_dcn_axis_size depends on the devices, and stays auto: {error}", file=sys.stderr)
    if arguments.plot_lr is not None:
        from lmtrain.optim.schedules import plot_learning_rate

        plot_learning_rate(run.config.optimizer, run.config.trainer.num_train_steps, arguments.plot_lr)
        print(f"wrote {arguments.plot_lr}")
        return 0
    shown = resolved(run.config)
    print(show(without_defaults(shown, run.loaded.tree) if arguments.changed else shown, run.loaded.tree), end="")
    transfer = run.config.transfer
    if arguments.resolved and transfer is not None:
        from lmtrain.transfer.factors import describe, factors_of

        factors = factors_of(run.config.model, transfer.base, run.config.optimizer)
        print("\n# transfer: factors of each parameter\n#")
        print("".join(f"#   {line}\n" for line in describe(factors)), end="")
    return 0


def _resolved(run: Run) -> Run:
    """The run as `lmtrain train` resolves it. Prints a note if the number of steps is not known yet."""
    from lmtrain.data.caches import needs_all
    from lmtrain.preprocess.prepare import find_caches
    from lmtrain.preprocess.split_cache import has_cache
    from lmtrain.train.start.checks import length_of_data
    from lmtrain.weights.hf_config import resolve_hf

    run = resolve_hf(run)
    data = run.config.data
    if needs_all(data, run.config.epoch, run.config.objective.needs_reference) is None or not any(
        s.urls("train") or s.id for s in data.sources().values()
    ):
        return run
    if not all(has_cache(source, "train") for source in data.sources().values()):
        print(
            "note: the data may end the run before num_train_steps; it is not tokenized yet (run `lmtrain preprocess`)",
            file=sys.stderr,
        )
        return run
    return resolve(run, length_of_data(run.config, find_caches(data, validation=False)))


def _schema(argv: list[str]) -> int:
    Parser("config schema", "Print a JSON Schema of the config, for editors.").parse_args(argv)
    print(json.dumps(build_schema(RunConfig, "An lmtrain config"), indent=2, ensure_ascii=False))
    return 0
