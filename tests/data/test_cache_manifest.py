"""The manifest of a token cache."""

import json

import pytest

from lmtrain.data.cache_manifest import CacheManifest, ShardInfo, load_manifest, manifest_path, save_manifest
from lmtrain.runtime.errors import UserError

SHARD = ShardInfo(
    file="shard-00000-of-00001.arrayrecord", source={"url": "a"}, bytes=100, sha256="abc", tokens=40, documents=3
)
MANIFEST = CacheManifest(
    split="train", recipe={"tokenizer": {"fingerprint": "f"}}, urls=["a"], dtype="<u2", shards=[SHARD, SHARD]
)


def test_a_manifest_reads_back_as_written(tmp_path):
    save_manifest(str(tmp_path), MANIFEST)
    assert load_manifest(str(tmp_path)) == MANIFEST
    assert (MANIFEST.tokens, MANIFEST.documents) == (80, 6)


def test_a_missing_manifest_loads_as_none(tmp_path):
    assert load_manifest(str(tmp_path)) is None


@pytest.mark.parametrize("change", [{"format": 99}, {"block_tokens": 5}])
def test_another_format_is_refused(tmp_path, change):
    save_manifest(str(tmp_path), MANIFEST)
    path = manifest_path(str(tmp_path))
    with open(path) as file:
        value = json.load(file)
    with open(path, "w") as file:
        json.dump(value | change, file)
    with pytest.raises(UserError, match=r"manifest\.json: unsupported format .*delete the folder"):
        load_manifest(str(tmp_path))


def test_a_corrupt_manifest_is_refused_with_advice(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 1,')
    with pytest.raises(UserError, match=r"manifest\.json: corrupt: .*delete the folder"):
        load_manifest(str(tmp_path))
