"""Build plan of one split: its shards, which of them exist, and whether they match the config."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmtrain.config.differences import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.config.remote import told
from lmtrain.data.cache_manifest import Manifest, ShardInfo, load_manifest, save_manifest, shard_name
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TextFormat, TooLong
from lmtrain.data.shards import Shards
from lmtrain.hf.chat_template import check_tokens
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.document_settings import (
    DocumentSettings,
    chat_template_of,
    check_special_tokens,
    document_settings,
    token_dtype,
)
from lmtrain.preprocess.sources import AnySource, FilesMissingError, describe_urls, list_sources
from lmtrain.runtime.atomic_files import remove_temporaries
from lmtrain.runtime.lock import FileLock
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import check_writable, file_size, is_url, join, list_names, read_json

if TYPE_CHECKING:
    from lmtrain.preprocess.write_shard import ShardJob

_UNUSED_BY_CHATS = ("text_key", "enforce_eos", "enforce_bos")


class CachePlan:
    """Cache of one split, finished or to be built. `shards` are the finished ones, and grow during the build."""

    def __init__(
        self,
        config: DataConfig,
        split: str,
        recipe: dict[str, Any],
        dtype: str,
        sources: list[AnySource],
        finished: Manifest | None,
    ):
        self.folder = split_folder(config, split)
        self.split = split
        self.recipe = recipe
        self.dtype = dtype
        self.sources = [shard.source for shard in finished.shards] if finished else [asdict(s) for s in sources]
        self.manifest = finished
        self.too_long: TooLong | None = None if isinstance(config.format, TextFormat) else config.format.too_long
        self.shards = Shards.of(finished) if finished is not None else Shards()
        self.jobs = [] if finished else self._jobs(config, sources)
        self._urls = describe_urls(config, split)
        self._infos: list[ShardInfo | None] = [None] * len(self.jobs)
        self._lock = None if is_url(self.folder) or finished else FileLock(os.path.join(self.folder, ".building"))

    def _jobs(self, config: DataConfig, sources: list[AnySource]) -> "list[ShardJob]":
        from lmtrain.preprocess.write_shard import (
            ShardJob,
        )  # imports the text readers, which a finished cache does not need

        settings = document_settings(config)
        template = chat_template_of(config)
        return [
            ShardJob(
                source,
                join(self.folder, shard_name(index, len(sources))),
                config.tokenizer,
                settings,
                self.recipe,
                config.max_document_bytes,
                config.max_bad_fraction,
                config.vocab_size,
                template,
            )
            for index, source in enumerate(sources)
        ]

    @property
    def complete(self) -> bool:
        """Whether every shard is finished."""
        return self.shards.complete

    @property
    def missing(self) -> "list[ShardJob]":
        """Jobs of the missing shards."""
        return [job for job, info in zip(self.jobs, self._infos, strict=True) if info is None]

    def make_folder(self) -> None:
        """Create the folder of the cache. Raises `UserError` if it cannot be created or is not writable."""
        if is_url(self.folder):
            check_writable(self.folder)
        else:
            try:
                os.makedirs(self.folder, exist_ok=True)
            except OSError as error:
                raise UserError(f"data.cache_dir: {self.folder} cannot be created: {error.strerror}") from None

    def acquire(self) -> bool:
        """Lock the cache for building and delete temporary files of killed builds. Returns whether it was free.

        A cache at a URL has no lock: concurrent builds write the same objects, each complete.
        """
        with told(self.folder, "written"):
            if self._lock is None or not self._lock.acquire():
                return self._lock is None
        remove_temporaries(self.folder)
        return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def holder(self) -> str:
        """Name of the process that holds the lock."""
        return "another process" if self._lock is None else self._lock.holder()

    def find_finished(self) -> None:
        """Add the shards that are finished on disk.

        Raises `UserError` if they were built with other settings or from other sources.
        """
        names = set(list_names(self.folder))
        found = {}
        for index, job in enumerate(self.jobs):
            name = f"{job.path.rpartition('/')[2]}.json"
            if self._infos[index] is None and name in names:
                found[name] = (index, _read_marker(join(self.folder, name)))
        others = {name for name in names if name.startswith("shard-") and name.endswith(".json")}
        expected = {f"{job.path.rpartition('/')[2]}.json": job.source for job in self.jobs}
        self._check(found, {name: _read_marker(join(self.folder, name)) for name in others - expected.keys()})
        for index, marker in found.values():
            if marker is not None and file_size(join(self.folder, marker[1].file)) == marker[1].bytes:
                self.add(index, marker[1])

    def add(self, index: int, info: ShardInfo) -> None:
        """Add the finished shard `index`."""
        self._infos[index] = info
        while len(self.shards.infos) < len(self._infos):
            following = self._infos[len(self.shards.infos)]
            if following is None:
                return
            self.shards.add(following)
        self.shards.finish()

    def write_manifest(self) -> Manifest:
        """Write the manifest, which marks the cache as complete."""
        if self.manifest is None:
            self.manifest = Manifest(self.split, self.recipe, self._urls, self.dtype, list(self.shards.infos))
            save_manifest(self.folder, self.manifest)
        return self.manifest

    def _check(self, found: dict[str, Any], others: dict[str, Any]) -> None:
        markers = {name: marker for name, (_, marker) in found.items()} | others
        cached = {name: marker for name, marker in markers.items() if marker is not None}
        for was, _ in cached.values():
            check_recipe(self.folder, was, self.recipe)
        lines = _changed({_key(info.source): info.source for _, info in cached.values()}, self.sources)
        expected = {f"{shard_name(i, len(self.jobs))}.json": _key(source) for i, source in enumerate(self.sources)}
        moved = [name for name, (_, info) in sorted(cached.items()) if expected.get(name) != _key(info.source)]
        if moved and not lines:
            lines.append(f"{moved[0]} has another index in the list of sources, or the list has another length")
        _refuse(self.folder, lines)


def plan_cache(config: DataConfig, split: str) -> CachePlan:
    """Plan the cache of `split`. Writes nothing.

    Raises `UserError` if the existing cache was built from other sources or with another tokenizer or settings, or if
    an input file is missing.
    """
    folder = split_folder(config, split)
    tokenizer = open_tokenizer(config.tokenizer, config.vocab_size)
    settings = document_settings(config)
    check_special_tokens(tokenizer, settings)
    if (template := chat_template_of(config)) is not None:
        check_tokens(template, tokenizer, "data.format.chat_template")
    recipe, dtype = _recipe(tokenizer, settings), token_dtype(tokenizer.vocab_size).str
    finished = _manifest_of(folder)
    if finished is not None:
        check_recipe(folder, finished.recipe, recipe)
        sources = _sources_of_finished(config, split, folder, finished)
    else:
        sources = list_sources(config, split)
    plan = CachePlan(config, split, recipe, dtype, sources, finished)
    if finished is None:
        plan.find_finished()
    return plan


def has_cache(config: DataConfig, split: str) -> bool:
    """Whether there is a finished cache. Raises `UserError` if a file is in the place of its folder."""
    return _manifest_of(split_folder(config, split)) is not None


def _manifest_of(folder: str) -> Manifest | None:
    try:
        return load_manifest(folder)
    except NotADirectoryError:
        raise UserError(f"data.cache_dir: {folder} cannot be created: a file is in its place") from None


def split_folder(config: DataConfig, split: str) -> str:
    """Folder of the cache of a split."""
    return join(config.cache_dir, split)


def _sources_of_finished(config: DataConfig, split: str, folder: str, finished: Manifest) -> list[AnySource]:
    """Sources of a finished cache, checked against the cache; empty if they cannot be checked."""
    same_urls = finished.urls == describe_urls(config, split)
    if config.id is not None and same_urls:
        return []  # a dataset is not downloaded again just to check for changes
    try:
        sources = list_sources(config, split)
    except FilesMissingError as error:
        if not same_urls:
            raise
        log.info(f"{folder}: using the finished cache, although its source files are missing ({error})")
        return []
    cached = {_key(shard.source): shard.source for shard in finished.shards}
    wanted = [asdict(source) for source in sources]
    if list(map(_content, cached.values())) == list(map(_content, wanted)):
        return sources  # perhaps in another folder: a project may be moved
    lines = _changed(cached, wanted)
    lines += [f"{_name(s)} is a source of this config, but not in the cache" for s in wanted if _key(s) not in cached]
    if not lines and list(cached) != list(map(_key, wanted)):
        lines.append("the sources are the same, in another order")
    _refuse(folder, lines)
    return sources


def _recipe(tokenizer: Tokenizer, settings: DocumentSettings) -> dict[str, Any]:
    documents = asdict(settings)
    if settings.text_documents == "line":  # caches built before this setting existed lack it
        del documents["text_documents"]
    if settings.format is None:  # likewise
        del documents["format"]
    else:  # what has no effect on instructions is no part of their recipe
        unused = ("text_key", "enforce_eos") if settings.format["type"] == "completion" else _UNUSED_BY_CHATS
        documents = {name: value for name, value in documents.items() if name not in unused}
    return {"tokenizer": tokenizer.identity, "documents": documents}


def _read_marker(path: str) -> tuple[dict[str, Any], ShardInfo] | None:
    """Recipe and info of a finished shard; None if the marker is missing or corrupt."""
    try:
        marker = read_json(path)
        return marker["recipe"], ShardInfo(**marker["shard"])
    except UserError:
        raise  # access failed
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def check_recipe(folder: str, cached: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `UserError` if a cache was built with another tokenizer or other settings."""
    _refuse(folder, describe_differences(cached, wanted, "the cache", "this config"))


def _key(source: dict[str, Any]) -> tuple[str, int | None]:
    return source["url"], source.get("start")


def _content(source: dict[str, Any]) -> dict[str, Any]:
    """A source without its folder."""
    return {**source, "url": os.path.basename(source["url"])}


def _name(source: dict[str, Any]) -> str:
    start = source.get("start")
    return str(source["url"]) if start is None else f"{source['url']} from byte {start:,}"


def _changed(before: dict[Any, Any], wanted: list[dict[str, Any]]) -> list[str]:
    now = {_key(source): source for source in wanted}
    lines = [f"{_name(s)} is in the cache, but no source of this config" for key, s in before.items() if key not in now]
    different = [s for key, s in now.items() if before.get(key, s) != s]
    return lines + [f"{_name(source)} has changed since it was cached" for source in different]


def _refuse(folder: str, differences: list[str]) -> None:
    if differences:
        shown = differences[:10] + ([f"and {len(differences) - 10} more"] if len(differences) > 10 else [])
        report = "\n".join(f"  {line}" for line in shown)
        raise UserError(
            f"{folder}: the cache does not match this config\n{report}\n"
            "  choose another data.cache_dir, or delete this folder to build it again"
        )
