"""Building of a token cache within a test."""

from lmtrain.data.cache_manifest import CacheManifest
from lmtrain.data.caches import open_store
from lmtrain.data.config import DataConfig
from lmtrain.data.token_store import TokenStore
from lmtrain.preprocess.executor import choose_executor
from lmtrain.preprocess.prepare import Build, wait
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.run.execution import RayConfig
from lmtrain.runtime.logging import ALONE


def build_cache(config: DataConfig, split: str) -> CacheManifest:
    """Build the missing shards of one split, and return the manifest of the finished cache."""
    cache = find_cache(config, split)
    wait(Build([cache], choose_executor(RayConfig(), config.num_preprocess_workers, ALONE)).start())
    assert cache.manifest is not None
    return cache.manifest


def open_built(config: DataConfig, split: str = "train") -> TokenStore:
    """Build what is missing of a cache, and open its tokens."""
    build_cache(config, split)
    return open_store(config, find_cache(config, split))
