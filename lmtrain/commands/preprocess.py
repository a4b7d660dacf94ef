"""`lmtrain preprocess CONFIG`: build the token caches of all splits, or resume a stopped build."""

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.data.caches import describe_epochs
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.plan import CachePlan
from lmtrain.preprocess.prepare import Plans, plan_caches, require_text, start_build, wait
from lmtrain.preprocess.prepare_demo import missing_demo
from lmtrain.run.config import RunConfig
from lmtrain.runtime.distributed import start_processes
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.processes import ALONE
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.train.start.hf_model import resolve_hf


def run(argv: list[str]) -> int:
    parser = Parser("preprocess", "Tokenize the config's text into a cache of ArrayRecord shards.", lists_settings=True)
    parser.add_argument("--dry-run", action="store_true", help="list the shards to build, without building them")
    arguments, run = parse_run(parser, argv)
    if arguments.dry_run:
        _print_plan(resolve_hf(run).config)
        return 0
    processes = start_processes(run.config.trainer.distributed)
    start_console_log(processes)
    config = resolve_hf(run).config
    with StopRequest("discarding unfinished shards") as stop:
        plans = plan_caches(config.data)
        build = start_build(config, plans, processes)
        try:
            wait(build, stop)
        except StoppedError:
            log.info("stopped; finished shards are kept: run the same command again to resume")
            return STOPPED_BY_SIGNAL
        finally:
            build.stop()
    _log_result(config, plans)
    return 0


def _log_result(config: RunConfig, plans: Plans) -> None:
    for plan in plans.all:
        shards = plan.shards.infos
        documents = sum(shard.documents for shard in shards)
        log.info(
            f"{plan.folder}: complete, {documents:,} documents, {plan.shards.tokens:,} tokens in {len(shards)} shards"
        )
    sizes, seq_len = config.trainer.batch_sizes, config.model.seq_len
    for epoch in describe_epochs(config.data, plans.caches.train, seq_len, sizes):
        log.info(f"{epoch} of {' or '.join(map(str, sizes.all))} sequences of {seq_len} tokens")


def _print_plan(config: RunConfig) -> None:
    missing = _missing_demo(config.data)
    if missing:
        print(f"{missing}: the demo corpus and its tokenizer will be created first; the shards are not known before")
        return
    plans = plan_caches(config.data)
    for plan in plans.all:
        _print_split(plan)
    if any(plan.missing for plan in plans.all):
        from lmtrain.preprocess.executor import choose_executor

        # outside a job, its number of processes is unknown
        print(f"on {choose_executor(config.trainer.ray, config.data.num_preprocess_workers, ALONE).label}")


def _missing_demo(config: DataConfig) -> str | None:
    require_text(config, "train")
    return missing_demo(config)


def _print_split(plan: CachePlan) -> None:
    if plan.manifest is not None:
        print(f"{plan.folder}: complete, nothing to do")
        return
    size = sum(job.source.bytes for job in plan.missing)
    print(f"{plan.folder}: {len(plan.missing)} of {len(plan.jobs)} shards to build, {size:,} bytes to read")
    for job in plan.missing:
        print(f"  {job.path.rpartition('/')[2]} <- {job.source.label} ({job.source.bytes:,} bytes)")
