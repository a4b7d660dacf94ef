"""`lmtrain preprocess CONFIG`: build the token caches of all splits, or resume a stopped build."""

import os
import sys

from lmtrain.commands.arguments import Parser, at_least, parse_run
from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.config.redact import redact
from lmtrain.data.cache_manifest import count_documents
from lmtrain.data.caches import describe_epochs
from lmtrain.preprocess.prepare import SplitCaches, find_caches, require_text, start_build, wait
from lmtrain.preprocess.prepare_demo import missing_demo, prepare_demo
from lmtrain.preprocess.sources import describe_urls, has_text
from lmtrain.run.config import RunConfig
from lmtrain.run.masked import require_secrets
from lmtrain.runtime.distributed import start_processes
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.processes import ALONE
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.weights.hf_config import resolve_hf


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
    arguments, run = parse_run(parser, argv)
    require_secrets(run.loaded)
    if arguments.dry_run:
        _print_shards(resolve_hf(run).config)
        return 0
    if arguments.show is not None:
        _show_documents(resolve_hf(run).config, arguments.show)
        return 0
    processes = start_processes(run.config.trainer.distributed)
    start_console_log(processes)
    config = resolve_hf(run).config
    caches = find_caches(config.data)
    with StopRequest("discarding unfinished shards") as stop:
        build = start_build(config, caches, processes)
        try:
            wait(build, stop)
        except StoppedError:
            log.info("stopped; finished shards are kept: run the same command again to resume")
            return STOPPED_BY_SIGNAL
        finally:
            build.stop()
    _log_result(config, caches)
    return 0


def _log_result(config: RunConfig, caches: SplitCaches) -> None:
    for cache in caches.all:
        shards = cache.shards.infos
        documents = count_documents(shards)
        in_place = sum(shard.in_place for shard in shards)
        where = f"{counted(len(shards), 'shard')}" + (f", {in_place:,} of them read in place" if in_place else "")
        number = "" if documents is None else f" {counted(documents, 'document')},"
        log.info(f"{cache.folder}: complete,{number} {cache.shards.tokens:,} tokens in {where}")
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
