"""The data of a tiny run, tokenized once for each process of the suite."""

import atexit
import functools
import shutil
import tempfile
import time
from typing import Any, NamedTuple

from conftest import tiny_settings

from lmtrain.data.caches import Caches
from lmtrain.hf.tokenizer import Tokenizer, load_tokenizer
from lmtrain.preprocess.executor import choose_executor
from lmtrain.preprocess.prepare import Build, find_caches
from lmtrain.run.config import RunConfig
from lmtrain.run.execution import RayConfig
from lmtrain.runtime.logging import ALONE


class OpenedRun(NamedTuple):
    """A config, its complete token caches, and its tokenizer."""

    config: RunConfig
    caches: Caches
    tokenizer: Tokenizer


@functools.cache
def _cache_folder() -> str:
    folder = tempfile.mkdtemp(prefix="lmtrain-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def open_run(**sections: Any) -> OpenedRun:
    """A tiny run with these changes to its sections: `open_run(model={"seq_len": 8})`."""
    settings = tiny_settings()
    settings["data"] |= {"num_preprocess_workers": 1, "cache_dir": _cache_folder()}
    settings["model"] |= {"num_layers": 1, "gradient_checkpointing": False}
    for name, changes in sections.items():
        settings[name] = settings.get(name, {}) | changes if isinstance(changes, dict) else changes
    config = RunConfig(**settings)
    caches = find_caches(config.data)
    for cache in caches.all:
        if cache.manifest is None:
            build = Build([cache], choose_executor(RayConfig(), 1, ALONE)).start()
            while build.running:
                time.sleep(0.02)
            build.check()
    return OpenedRun(config, caches, load_tokenizer(config.data.tokenizer))
