"""Cache of one split of a source: its shards, which of them exist, and whether they match the config."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmtrain.data.cache_manifest import (
    CacheManifest,
    ShardInfo,
    Shards,
    has_targets,
    load_manifest,
    save_manifest,
    shard_name,
)
from lmtrain.data.caches import Cache
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TextFormat
from lmtrain.data.targets import check_contents
from lmtrain.data.token_file import log_touched
from lmtrain.data.verification import forget
from lmtrain.hf.chat_template import check_tokens
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.hf_dataset import folder_state
from lmtrain.preprocess.input_files import FilesMissingError
from lmtrain.preprocess.recipe import (
    Dropped,
    OtherCacheError,
    chat_template_of,
    check_recipe,
    check_sources,
    check_special_tokens,
    is_touched,
    recipe_of,
    token_dtype,
)
from lmtrain.preprocess.record_reader import has_labels
from lmtrain.preprocess.sources import AnySource, as_recorded, as_recorded_in, describe_urls, list_sources
from lmtrain.preprocess.token_sources import TokenSource
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import redact
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.storage import (
    FileLock,
    check_writable,
    delete_folder,
    file_size,
    is_url,
    join,
    list_names,
    read_json,
    remove_temporaries,
)
from lmtrain.runtime.text import require_utf8_name

if TYPE_CHECKING:
    from lmtrain.preprocess.write_shard import ShardJob


# Names of the files in a cache's folder; `reference-` are log-probabilities (`lmtrain/weights/reference.py`).
_OWN_FILE = re.compile(r"(shard-|reference-|manifest\.json|\.building).*")


class SplitCache(Cache):
    """Cache of one split, finished or to be built. `shards` are the finished ones, and grow during the build."""

    def __init__(
        self,
        config: DataConfig,
        split: str,
        recipe: dict[str, Any],
        dtype: str,
        sources: Sequence[AnySource],
        finished: CacheManifest | None,
        is_read: bool = True,
        dropped: Dropped | None = None,
        has_new_times: bool = False,
    ):
        super().__init__(
            folder=split_folder(config, split),
            recipe=recipe,
            sources=[shard.source for shard in finished.shards] if finished else list(map(as_recorded, sources)),
            dtype=dtype,
            shards=Shards.of(finished) if finished else Shards(),
            too_long=None
            if isinstance(config.format, TextFormat) or not has_targets(recipe)
            else config.format.too_long,
        )
        self.split = split
        self.manifest = finished
        self.is_read = is_read
        self.has_new_times = has_new_times
        self.jobs = {} if finished else self._jobs(config, sources, dropped)
        self._urls = describe_urls(config, split)
        self._infos = (
            [] if finished else [source.info if isinstance(source, TokenSource) else None for source in sources]
        )
        self._lock = None if is_url(self.folder) or finished else FileLock(os.path.join(self.folder, ".building"))
        self._publish()

    def _jobs(self, config: DataConfig, sources: Sequence[AnySource], dropped: Dropped | None) -> "dict[int, ShardJob]":
        """How to build each shard that is not read in place, by its number."""
        if all(isinstance(source, TokenSource) for source in sources):
            return {}
        # imports the text readers, which a finished cache does not need
        from lmtrain.preprocess.write_shard import ShardJob

        template, paths = chat_template_of(config), [shard_name(i, len(sources)) for i in range(len(sources))]
        which = {} if dropped is None else dropped.documents
        return {
            number: ShardJob(
                source=source,
                path=join(self.folder, path),
                config=config,
                recipe=self.recipe,
                split=self.split,
                template=template,
                dropped=which.get(number),
            )
            for number, (source, path) in enumerate(zip(sources, paths, strict=True))
            if not isinstance(source, TokenSource)
        }

    @property
    def complete(self) -> bool:
        return self.shards.complete

    @property
    def missing(self) -> "dict[int, ShardJob]":
        """Jobs of the missing shards by their index."""
        return {index: self.jobs[index] for index, info in enumerate(self._infos) if info is None}

    def acquire(self) -> bool:
        """Lock the cache for building and delete temporary files of killed builds. Returns whether it was free.

        A cache at a URL has no lock: concurrent builds write the same objects, each complete.
        """
        with remote_errors(self.folder, "written"):
            if self._lock is None or not self._lock.acquire():
                return self._lock is None
        remove_temporaries(self.folder)
        return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def holder(self) -> str:
        return "another process" if self._lock is None else self._lock.holder()

    def find_finished(self) -> None:
        """Add the shards that are finished on disk.

        Raises `UserError` if they were built with other settings or from other sources.
        """
        missing = {f"{job.name}.json": index for index, job in self.missing.items()}
        known = {f"{job.name}.json" for job in self.jobs.values()} - missing.keys()
        markers = {}
        for name in list_names(self.folder):
            if name.startswith("shard-") and name.endswith(".json") and name not in known:
                marker = _read_marker(join(self.folder, name))
                if marker is not None:
                    markers[name] = marker
        for recipe, _ in markers.values():
            check_recipe(self.folder, recipe, self.recipe)
        cached = {name: info.source for name, (_, info) in markers.items()}
        names = {f"{job.name}.json": job.source for job in self.jobs.values()}
        expected = {name: as_recorded_in(source, cached.get(name)) for name, source in names.items()}
        check_sources(self.folder, cached, expected, complete=False)
        for name, index in missing.items():
            if name in markers:
                info = markers[name][1]
                if file_size(join(self.folder, info.file)) == info.bytes:
                    self.add(index, info)

    def add(self, index: int, info: ShardInfo) -> None:
        """Add the finished shard `index`. Readers get shards in order."""
        self._infos[index] = info
        self._publish()

    def _publish(self) -> None:
        """Give readers the shards up to the first one that is missing."""
        if self.shards.complete:
            return
        while len(self.shards.infos) < len(self._infos):
            following = self._infos[len(self.shards.infos)]
            if following is None:
                return
            self.shards.add(following)
        self.shards.finish()

    def write_manifest(self) -> CacheManifest:
        """Write the manifest, which marks the cache as complete. Raises `UserError` if it has nothing to learn from."""
        if self.manifest is None:
            if self.is_read:
                check_contents(self.folder, self.shards.infos, self.recipe)
            self.manifest = CacheManifest(
                split=self.split, recipe=self.recipe, urls=self._urls, dtype=self.dtype, shards=list(self.shards.infos)
            )
            save_manifest(self.folder, self.manifest)
            forget(self.folder)
        return self.manifest

    def save_times(self) -> None:
        """Record the present times of files whose contents are the same, so that they are not compared again. Without
        access they are."""
        if self.has_new_times and self.manifest is not None:
            with contextlib.suppress(OSError, UserError):
                save_manifest(self.folder, self.manifest)


def delete_cache(folder: str) -> None:
    """Delete a cache. Raises `UserError` if its folder has other files, or if another process is building it."""
    others = [name for name in list_names(folder) if not _OWN_FILE.fullmatch(name)]
    if others:
        raise UserError(f"--rebuild: {folder} also holds {others[0]}, which is no file of a cache; move it away")
    lock = None if is_url(folder) else FileLock(os.path.join(folder, ".building"))
    if lock is not None and not lock.acquire():
        raise UserError(f"--rebuild: {folder}: {lock.holder()} is building it")
    try:
        delete_folder(folder)
    finally:
        if lock is not None:
            lock.release()


def make_folder(folder: str) -> None:
    """Create a folder of `data.cache_dir`. Raises `UserError` if it cannot be created or is not writable."""
    require_utf8_name(folder, "choose another data.cache_dir")
    if is_url(folder):
        check_writable(folder)
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: {folder} cannot be created: {error.strerror}") from None


def find_cache(config: DataConfig, split: str, is_read: bool = True, dropped: Dropped | None = None) -> SplitCache:
    """The cache of `split`, and which of its shards exist. Writes nothing. Without `is_read` it may have nothing to
    learn from. `dropped` are documents to leave out; a finished cache is used whatever it leaves out.

    Raises `UserError` if the existing cache was built from other sources or with another tokenizer or settings, or if
    an input file is missing.
    """
    folder = split_folder(config, split)
    tokenizer = open_tokenizer(config.tokenizer, config.vocab_size)
    check_special_tokens(tokenizer, config)
    finished = _manifest_of(folder)
    if (template := chat_template_of(config)) is not None:
        check_tokens(template, tokenizer, "data.format.chat_template")
        if finished is None:
            template.check()
    dtype = token_dtype(tokenizer.vocab_size).str
    if finished is not None:
        recipe = _with_dropped(recipe_of(config, tokenizer, template, has_targets(finished.recipe), split), dropped)
        if dropped is None and "dropped" in finished.recipe:
            recipe["dropped"] = finished.recipe["dropped"]
            log.info(f"{folder}: without {_describe_dropped(finished)}")
        check_recipe(folder, finished.recipe, recipe)
        present = _with_sources(config, split, folder, finished, tokenizer)
        if is_read:
            check_contents(folder, present.shards, recipe)
        pairs = list(zip(finished.shards, present.shards, strict=True))
        touched = [now for before, now in pairs if is_touched(before.source, now.source)]
        if in_place := [shard.file for shard in touched if shard.in_place]:
            log_touched(in_place)
        return SplitCache(config, split, recipe, dtype, [], present, is_read, has_new_times=bool(touched))
    sources = list_sources(config, split, tokenizer)
    for source in sources:
        if isinstance(source, TokenSource):
            source.check_index()
    recipe = recipe_of(config, tokenizer, template, has_labels(sources, config, tokenizer.vocab_size), split)
    cache = SplitCache(config, split, _with_dropped(recipe, dropped), dtype, sources, None, is_read, dropped)
    cache.find_finished()
    return cache


def _with_dropped(recipe: dict[str, Any], dropped: Dropped | None) -> dict[str, Any]:
    return recipe if dropped is None else recipe | {"dropped": dropped.recipe}


def _describe_dropped(manifest: CacheManifest) -> str:
    documents, tokens = (sum(getattr(s, name) for s in manifest.shards) for name in ("dropped", "dropped_tokens"))
    kinds = " and ".join(manifest.recipe["dropped"])
    return f"{counted(documents, 'document')} ({tokens:,} tokens) that were dropped as {kinds}"


def has_cache(config: DataConfig, split: str) -> bool:
    """Whether there is a finished cache. Raises `UserError` if a file is in the place of its folder."""
    return _manifest_of(split_folder(config, split)) is not None


def _manifest_of(folder: str) -> CacheManifest | None:
    try:
        return load_manifest(folder)
    except NotADirectoryError:
        raise UserError(f"data.cache_dir: {folder} cannot be created: a file is in its place") from None


def split_folder(config: DataConfig, split: str) -> str:
    """Folder of the cache of a split."""
    return join(config.cache_dir, split)


def _with_sources(
    config: DataConfig, split: str, folder: str, finished: CacheManifest, tokenizer: Tokenizer
) -> CacheManifest:
    """A finished cache with the files that are read in place, where they are now, and the present times of files.

    Raises `UserError` if it has other sources; sources that are unavailable, and not read any more, are not checked.
    """
    same_urls = finished.urls == describe_urls(config, split)
    if config.id is not None and same_urls:
        _check_dataset(folder, config.id, finished)
        return finished  # a dataset is not downloaded again just to check for changes
    try:
        sources = list_sources(config, split, tokenizer)
    except FilesMissingError as error:
        if not same_urls or any(shard.in_place for shard in finished.shards):
            raise
        log.info(f"{folder}: using the finished cache, although its source files are unavailable ({error})")
        return finished
    cached = dict(enumerate(shard.source for shard in finished.shards))
    expected = {number: as_recorded_in(source, cached.get(number)) for number, source in enumerate(sources)}
    check_sources(folder, cached, expected, complete=True)
    pairs = zip(sources, finished.shards, strict=True)
    found = replace(finished, shards=[s.info if isinstance(s, TokenSource) else shard for s, shard in pairs])
    shards = [_with_time(shard, as_recorded(source)) for source, shard in zip(sources, found.shards, strict=True)]
    return replace(found, shards=shards)


def _check_dataset(folder: str, id: str, finished: CacheManifest) -> None:
    """Raise `UserError` if the files of a dataset in a local folder are others, and warn if they are only newer."""
    source = finished.shards[0].source
    files, modified = folder_state(id)
    if files is None or source.get("files") is None or (source["files"], source["modified"]) == (files, modified):
        return
    if source["files"] != files:
        raise OtherCacheError(folder, f"{folder}: the files of data.id {id} have changed since they were cached")
    log.warning(
        f"{folder}: files of data.id {id} were modified since they were cached; if their rows differ, choose another "
        "data.cache_dir"
    )


def _with_time(shard: ShardInfo, recorded: dict[str, Any]) -> ShardInfo:
    """A shard with the present time of its source, whose content was compared (caches of today have a sample)."""
    if shard.source["url"] != recorded["url"] or "sample" not in shard.source:
        return shard
    return replace(shard, source={**shard.source, "modified": recorded["modified"]})


def _read_marker(path: str) -> tuple[dict[str, Any], ShardInfo] | None:
    """Recipe and info of a finished shard; None if the marker is missing or corrupt."""
    try:
        marker = redact(read_json(path))
        return marker["recipe"], ShardInfo(**marker["shard"])
    except UserError:
        raise  # access failed
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
