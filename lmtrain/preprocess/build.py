"""Building the token cache of a split: decide what is missing, build it, write the manifest last."""

import os
import time
from dataclasses import asdict
from typing import Any

from lmtrain.config.compare import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.data.manifest import Manifest, ShardInfo, load_manifest, save_manifest, shard_name
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.local import Counts, build_locally
from lmtrain.preprocess.shard import ShardJob
from lmtrain.preprocess.sources import AnySource, FilesMissingError, describe_urls, list_sources
from lmtrain.preprocess.tokenize import DocumentSettings, check_special_tokens, token_dtype
from lmtrain.runtime.files import read_json, remove_temporaries
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import Progress, format_seconds


def build_cache(config: DataConfig, split: str) -> Manifest:
    """The finished cache of `split`, built as far as it is not there yet.

    Raises `UserError` if the cache at that place was made from other sources, with another tokenizer or settings,
    or if an input file is missing or wrong.
    """
    if "://" in config.cache_dir:
        raise UserError(f"data.cache_dir: {config.cache_dir} is a URL; caches are built in a local folder so far")
    folder = split_folder(config, split)
    tokenizer = open_tokenizer(config.tokenizer)
    settings = DocumentSettings(config.text_key, config.enforce_eos, config.enforce_bos, config.on_bad_record)
    check_special_tokens(tokenizer, settings)
    recipe = _recipe(tokenizer, settings)
    try:
        finished = load_manifest(folder)
    except NotADirectoryError:
        raise UserError(f"data.cache_dir: {folder} cannot be made: there is a file in its way") from None
    urls = describe_urls(config, split)
    if finished is not None:
        _check_recipe(folder, finished.recipe, recipe)
        if config.id is not None and finished.urls == urls:
            return finished  # a data set is not fetched again to see whether it has changed
    try:
        sources = list_sources(config, split)
    except FilesMissingError as error:
        if finished is None or finished.urls != urls:
            raise
        log.info(f"{folder}: using the finished cache, whose source files are no longer there ({error})")
        return finished
    if finished is not None:
        _check_sources(folder, [shard.source for shard in finished.shards], sources)
        return finished
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: {folder} cannot be made: {error.strerror}") from None
    remove_temporaries(folder)
    _check_markers(folder, recipe, sources)
    try:
        shards = _build_missing(config, split, folder, sources, tokenizer.path, settings, recipe)
    except BaseException:
        remove_temporaries(folder)  # finished shards stay: the next run goes on from them
        raise
    manifest = Manifest(split, recipe, urls, token_dtype(tokenizer.vocab_size).str, shards)
    save_manifest(folder, manifest)
    _tell_skipped(manifest)
    return manifest


def _tell_skipped(manifest: Manifest) -> None:
    if manifest.skipped:
        told = [record for shard in manifest.shards for record in shard.bad_records]
        more = [f"and {manifest.skipped - len(told):,} more"] if manifest.skipped > len(told) else []
        report = "\n".join(f"  {line}" for line in [*told[:20], *more])
        log.warning(f"preprocess {manifest.split}: skipped {manifest.skipped:,} bad records\n{report}")


def split_folder(config: DataConfig, split: str) -> str:
    return os.path.join(os.path.expanduser(config.cache_dir), split)


def _recipe(tokenizer: Tokenizer, settings: DocumentSettings) -> dict[str, Any]:
    documents = asdict(settings)
    if settings.on_bad_record == "error":
        del documents["on_bad_record"]  # as in caches from before there was a choice
    return {"tokenizer": tokenizer.identity, "documents": documents}


def _build_missing(
    config: DataConfig,
    split: str,
    folder: str,
    sources: list[AnySource],
    tokenizer: str,
    settings: DocumentSettings,
    recipe: dict[str, Any],
) -> list[ShardInfo]:
    """Every shard's info, in source order; those without a finished-marker are built."""
    names = [shard_name(index, len(sources)) for index in range(len(sources))]
    infos = {name: _finished_shard(folder, name) for name in names}
    jobs = [
        ShardJob(
            source,
            os.path.join(folder, name),
            tokenizer,
            settings,
            recipe,
            config.max_document_bytes,
            config.max_bad_fraction,
        )
        for name, source in zip(names, sources, strict=True)
        if infos[name] is None
    ]
    if jobs:
        if len(jobs) < len(sources):
            log.info(f"{folder}: {len(sources) - len(jobs)} of {len(sources)} shards are there, continuing")
        for info in _with_progress(jobs, config.num_preprocess_workers, split):
            infos[info.file.removesuffix(".arrayrecord")] = info
    return [info for info in infos.values() if info is not None]


def _with_progress(jobs: list[ShardJob], workers: int | None, split: str) -> list[ShardInfo]:
    began = time.monotonic()
    total = sum(job.source.bytes for job in jobs)
    finished: list[ShardInfo] = []
    counts: Counts = (0, 0, 0)

    with Progress(f"preprocess {split}", total) as progress:

        def show(now: Counts) -> None:
            nonlocal counts
            counts = now
            seconds = max(time.monotonic() - began, 1e-9)
            documents, tokens, read = counts
            progress.update(
                read,
                f"{100 * read // max(total, 1)}%, {len(finished)}/{len(jobs)} shards, {documents:,} documents, "
                f"{tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, {read / 1e6 / seconds:.1f} MB/s read",
            )

        for info in build_locally(jobs, workers, show):
            finished.append(info)
    seconds = time.monotonic() - began
    documents, tokens, _ = counts
    log.info(
        f"preprocess {split}: {documents:,} documents, {tokens:,} tokens in {len(jobs)} shards, "
        f"{format_seconds(seconds)}, {tokens / seconds:,.0f} tokens/s"
    )
    return finished


def _finished_shard(folder: str, name: str) -> ShardInfo | None:
    """The info in a shard's marker, None if it has none or its file is not whole."""
    marker = _read_marker(folder, f"{name}.json")
    if marker is None:
        return None
    file = os.path.join(folder, marker[1].file)
    return marker[1] if os.path.isfile(file) and os.path.getsize(file) == marker[1].bytes else None


def _read_marker(folder: str, name: str) -> tuple[dict[str, Any], ShardInfo] | None:
    """Recipe and info of a finished shard; a damaged marker is of no more use than a missing one."""
    try:
        marker = read_json(os.path.join(folder, name))
        return marker["recipe"], ShardInfo(**marker["shard"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _check_markers(folder: str, recipe: dict[str, Any], sources: list[AnySource]) -> None:
    """An unfinished cache must be of the same recipe, and its shards of the sources in the same places."""
    markers = {name: _read_marker(folder, name) for name in os.listdir(folder) if name.endswith(".json")}
    cached = {name: marker for name, marker in markers.items() if marker is not None}
    for was, _ in cached.values():
        _check_recipe(folder, was, recipe)
    now = {source.url: asdict(source) for source in sources}
    lines = _changed({info.source["url"]: info.source for _, info in cached.values()}, now)
    expected = {f"{shard_name(i, len(sources))}.json": source.url for i, source in enumerate(sources)}
    moved = [name for name, (_, info) in sorted(cached.items()) if expected.get(name) != info.source["url"]]
    if moved and not lines:
        lines.append(f"{moved[0]} is of another place in the list of sources, or of a list of another length")
    _refuse(folder, lines)


def _check_recipe(folder: str, cached: dict[str, Any], wanted: dict[str, Any]) -> None:
    _refuse(folder, describe_differences(cached, wanted, "the cache", "this config"))


def _check_sources(folder: str, cached: list[dict[str, Any]], wanted: list[AnySource]) -> None:
    before = {source["url"]: source for source in cached}
    now = {source.url: asdict(source) for source in wanted}
    lines = _changed(before, now)
    lines += [f"{url} is a source of this config, but not in the cache" for url in now if url not in before]
    if not lines and list(before) != list(now):
        lines.append("the sources are the same, in another order")
    _refuse(folder, lines)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    lines = [f"{url} is in the cache, but no source of this config" for url in before if url not in now]
    return lines + [f"{url} has changed since it was cached" for url in now if before.get(url, now[url]) != now[url]]


def _refuse(folder: str, differences: list[str]) -> None:
    if differences:
        shown = differences[:10] + ([f"and {len(differences) - 10} more"] if len(differences) > 10 else [])
        report = "\n".join(f"  {line}" for line in shown)
        raise UserError(
            f"{folder}: this cache was built from something else\n{report}\n"
            "  choose another data.cache_dir, or delete this folder to build it again"
        )
