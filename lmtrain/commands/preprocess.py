"""`lmtrain preprocess CONFIG`: build the token caches of all splits, or resume a stopped build."""

import argparse
import os
import sys
import time

from lmtrain.commands.arguments import Parser, at_least, parse_run
from lmtrain.data.cache_manifest import count_documents
from lmtrain.data.caches import describe_epochs
from lmtrain.data.verification import bytes_to_verify, verify
from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig, check_benchmarks
from lmtrain.preprocess.prepare import SplitCaches, find_caches, require_text, start_build, wait
from lmtrain.preprocess.prepare_demo import missing_demo, prepare_demo
from lmtrain.preprocess.recipe import Dropped
from lmtrain.preprocess.sources import describe_urls, has_text
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run, require_secrets
from lmtrain.runtime.distributed import start_processes
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import ALONE, Processes, log, start_console_log
from lmtrain.runtime.output import standard_streams
from lmtrain.runtime.progress import Progress, format_bytes
from lmtrain.runtime.redact import redact
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.weights.hf_config import resolve_hf

# Words: as in GPT-3 (Brown et al. 2020, appendix C).
_NGRAM = 13


def run(argv: list[str]) -> int:
    parser = Parser("preprocess", "Tokenize the config's text into a cache of ArrayRecord shards.", lists_settings=True)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--dry-run", action="store_true", help="list the shards to build, without building them")
    only.add_argument(
        "--show",
        type=at_least(1),
        metavar="N",
        help="print the first N documents of each source as the model will see them: text, tokens, which are targets, "
        "where sequences begin; nothing is built",
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="delete caches that do not match the config, and build them again"
    )
    _add_check_flags(parser)
    arguments, run = parse_run(parser, argv)
    _check_flags(arguments)
    require_secrets(run.loaded)
    if arguments.dry_run:
        _print_shards(resolve_hf(run).config)
        return 0
    if arguments.show is not None:
        _show_documents(resolve_hf(run).config, arguments.show)
        return 0
    return _build(arguments, run)


@standard_streams(has_result=False)
def _build(arguments: argparse.Namespace, run: Run) -> int:
    processes = start_processes(run.config.trainer.distributed)
    start_console_log(processes)
    config = resolve_hf(run).config
    with StopRequest("discarding unfinished shards") as stop:
        try:
            dropped = _check_texts(arguments, config, processes, stop)
            caches = find_caches(config.data, dropped=dropped, rebuild=arguments.rebuild)
            build = start_build(config, caches, processes)
            try:
                wait(build, stop)
            finally:
                build.stop()
            _verify_files(caches, processes, stop)
        except StoppedError:
            log.info("stopped; finished shards are kept: run the same command again to resume")
            return STOPPED_BY_SIGNAL
    _log_result(config, caches)
    return 0


def _verify_files(caches: SplitCaches, processes: Processes, stop: StopRequest) -> None:
    """Read the files of token ids that are read in place, whose ids a run might refuse; each once on a machine.

    Raises `UserError` for these, and `StoppedError` after a request to `stop`.
    """
    to_read = [cache for cache in caches.all if any(shard.layout for shard in cache.shards.infos)]
    total, done, began = sum(bytes_to_verify(cache.folder, cache.shards) for cache in to_read), 0, time.monotonic()
    with Progress("verify", total, quiet=not processes.is_first or not total) as progress:

        def report(read: int) -> None:
            nonlocal done
            if stop.requested:
                raise StoppedError
            done += read
            rate = format_bytes(done / max(time.monotonic() - began, 1e-9))
            progress.update(done, f"{format_bytes(done)} of {format_bytes(total)}, {rate}/s")

        for cache in to_read:
            verify(cache.folder, cache.shards, report)
            cache.shards.check()


def _add_check_flags(parser: Parser) -> None:
    checks = parser.add_argument_group("checks of the text")
    add = checks.add_argument
    add(
        "--check-contamination",
        metavar="TASK,...",
        help="report training documents that share words with items of these benchmarks of lm-eval",
    )
    add("--ngram", type=at_least(1), metavar="N", help="number of consecutive words that count as shared (default: 13)")
    add("--drop", action="store_true", help="leave these documents out of the cache")
    add(
        "--check-duplicates",
        action="store_true",
        help="report documents that occur twice, but for case and punctuation; --check-contamination does, too",
    )
    add("--drop-duplicates", action="store_true", help="leave training documents out of the cache that occurred before")
    add("--include_path", metavar="DIR", help="folder with YAML files of more benchmarks")
    add("--confirm_run_unsafe_code", action="store_true", help="allow benchmarks that run Python code of their own")


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for flags without the one that they belong to."""
    for flag in ("ngram", "drop", "include_path", "confirm_run_unsafe_code"):
        if getattr(arguments, flag) and arguments.check_contamination is None:
            raise UserError(f"--{flag}: requires --check-contamination TASK,...")
    checks = arguments.check_contamination is not None or arguments.check_duplicates or arguments.drop_duplicates
    if checks and (arguments.dry_run or arguments.show is not None):
        raise UserError("--dry-run and --show read no text to check; remove the flags of checks")


def _check_texts(
    arguments: argparse.Namespace, config: RunConfig, processes: Processes, stop: StopRequest
) -> dict[str, Dropped]:
    """The training documents to drop, by source."""
    tasks = arguments.check_contamination
    if tasks is None and not arguments.check_duplicates and not arguments.drop_duplicates:
        return {}
    from lmtrain.preprocess.check_texts import check_texts

    items = None
    if tasks is not None:
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        if not names:
            raise UserError("--check-contamination: names no benchmark, such as hellaswag,mmlu")
        harness = EvalHarnessConfig(
            task_spec=names,
            include_path=arguments.include_path,
            confirm_run_unsafe_code=arguments.confirm_run_unsafe_code,
        )
        check_benchmarks(harness)
        from lmtrain.evaluation.benchmarks.tasks import load_items

        items = list(load_items(harness))
    size = arguments.ngram or _NGRAM
    return check_texts(config, items, size, arguments.drop, arguments.drop_duplicates, processes, stop)


def _log_result(config: RunConfig, caches: SplitCaches) -> None:
    for cache in caches.all:
        shards = cache.shards.infos
        documents = count_documents(shards)
        in_place = sum(shard.in_place for shard in shards)
        where = f"{counted(len(shards), 'shard')}" + (f", {in_place:,} of them read in place" if in_place else "")
        number = "" if documents is None else f" {counted(documents, 'document')},"
        log.info(f"{cache.folder}: complete,{number} {cache.shards.tokens:,} tokens in {where}")
        if dropped := sum(shard.dropped for shard in shards):
            tokens = sum(shard.dropped_tokens for shard in shards)
            log.info(f"{cache.folder}: {counted(dropped, 'document')} of {tokens:,} tokens dropped")
    sizes, seq_len = config.trainer.batch_sizes, config.model.seq_len
    for epoch in describe_epochs(config.data, caches.train, seq_len, sizes):
        log.info(f"{epoch} of {' or '.join(map(str, sizes.all))} sequences of {seq_len} tokens")


def _show_documents(config: RunConfig, number: int) -> None:
    from lmtrain.hf.find_tokenizer import open_tokenizer
    from lmtrain.preprocess.show import describe_document, first_documents

    require_text(config.data, "train")
    prepare_demo(config.data)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for name, source in config.data.sources().items():
        if not has_text(source, "train"):
            continue
        tokenizer = open_tokenizer(source.tokenizer, source.vocab_size)
        print(f"{f'{name}: ' if name else ''}sequences of {config.model.seq_len:,} tokens, in the order of the files\n")
        documents = list(first_documents(source, config.model.seq_len, number))
        for document in documents:
            print(describe_document(document, tokenizer, colour) + "\n")
        if not documents:
            raise UserError(f"{', '.join(describe_urls(source, 'train'))}: no documents")


def _print_shards(config: RunConfig) -> None:
    require_text(config.data, "train")
    if folder := missing_demo(config.data):
        print(f"{folder}: the demo corpus and its tokenizer will be created first; the shards are not known before")
        return
    caches = find_caches(config.data)
    for cache in caches.all:
        folder, missing = redact(cache.folder), list(cache.missing.values())
        if cache.manifest is not None:
            print(f"{folder}: complete, nothing to do")
            continue
        size = sum(job.source.bytes for job in missing)
        print(f"{folder}: {len(missing)} of {counted(len(cache.jobs), 'shard')} to build, {size:,} bytes to read")
        for job in missing:
            print(f"  {job.name} <- {job.source.label} ({job.source.bytes:,} bytes)")
    if any(cache.missing for cache in caches.all):
        from lmtrain.preprocess.executor import choose_executor

        # outside a job, its number of processes is unknown
        print(f"on {choose_executor(config.trainer.ray, config.data.num_preprocess_workers, ALONE).label}")
