"""Caches on disk: used, used in part, or refused."""

import json
import os
import shutil

import pytest
from cache_building import build_cache
from preprocess.conftest import NAMES, config, contents, lines

from lmtrain.data.cache_manifest import load_manifest
from lmtrain.hf.extend_tokenizer import learn_bpe
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer
from lmtrain.preprocess.sources import source_checksums
from lmtrain.preprocess.split_cache import find_cache, make_folder
from lmtrain.preprocess.write_shard import build_shard
from lmtrain.runtime.errors import UserError


def refusal(wanted):
    with pytest.raises(UserError) as error:
        find_cache(wanted, "train")
    assert str(error.value).startswith("cache/train: ")
    assert "data.cache_dir" in str(error.value)
    return str(error.value)


def finished_manifest(**changes):
    """The manifest of the cache if it is complete."""
    return find_cache(config(**changes), "train").manifest


def test_a_finished_cache_also_of_the_same_tokenizer_in_another_folder_is_used(work, cache):
    assert finished_manifest() == load_manifest(str(cache))
    shutil.copytree("tok", "elsewhere")
    assert finished_manifest(tokenizer="elsewhere") == load_manifest(str(cache))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("shard-00001-of-00003.json", None),
        ("shard-00000-of-00003.arrayrecord", None),
        ("shard-00000-of-00003.arrayrecord", b"truncated"),
        ("shard-00000-of-00003.json", b"\x00\x00"),
    ],
)
def test_a_missing_or_damaged_shard_is_built_again(cache, file, content):
    (cache / "manifest.json").unlink()
    (cache / file).unlink()
    if content is not None:
        (cache / file).write_bytes(content)
    assert [job.name for job in find_cache(config(), "train").missing.values()] == [file.partition(".")[0]]


def test_another_tokenizer_is_refused(work, cache):
    save_tokenizer(learn_bpe(["other words"], 265), "other", eos="<|endoftext|>", bos="<|endoftext|>")
    ours, theirs = load_tokenizer("tok"), load_tokenizer("other")
    message = refusal(config(tokenizer="other"))
    for name in ("fingerprint", "vocab_size"):
        assert (
            f"tokenizer.{name}: the cache has {getattr(ours, name)!r}, this config has {getattr(theirs, name)!r}"
            in message
        )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"text_key": "body"}, "documents.text_key: the cache has 'text', this config has 'body'"),
        # the recipe omits the default, as in caches built before the setting existed
        ({"text_documents": "file"}, "documents.text_documents: the cache has nothing, this config has 'file'"),
        ({"train_urls": ["b.jsonl", "a.jsonl", "c.jsonl"]}, "another order"),
        ({"train_urls": ["a.jsonl", "c.jsonl"]}, "b.jsonl is in the cache"),
        ({"train_urls": [*NAMES, "other.jsonl"]}, "other.jsonl is a source of this config"),
    ],
)
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "not complete"])
def test_a_cache_of_other_settings_or_sources_is_refused(work, cache, change, line, complete):
    (work / "other.jsonl").write_text(lines("new text"))
    if not complete:
        (cache / "manifest.json").unlink()
    before = contents(cache)
    if complete or "other.jsonl" not in line:  # which may be missing in a cache that is not complete
        assert line in refusal(config(**change))
    (work / "b.jsonl").write_text(lines("other text"))
    assert "  b.jsonl has changed since it was cached\n" in refusal(config())
    assert contents(cache) == before


def test_the_files_of_a_finished_cache_may_move_to_another_folder(work, cache):
    (work / "moved").mkdir()
    for name in NAMES:
        shutil.move(work / name, work / "moved" / name)
    urls = [f"moved/{name}" for name in NAMES]
    assert finished_manifest(train_urls=urls) == load_manifest(str(cache))
    (work / "moved" / "b.jsonl").write_text(lines("other text"))
    assert "moved/b.jsonl is a source of this config, but not in the cache" in refusal(config(train_urls=urls))


def edit_middle(path, time=None):
    """Change a byte in the middle of a file. Its size, both ends and, with `time`, its time stay."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if time is not None:
        os.utime(path, ns=(time, time))


@pytest.fixture
def large(work):
    """A finished cache of a file that is larger than the parts of it which are read at each start, in two shards."""
    (work / "large.jsonl").write_text(lines(*(f"line {i} {'the line has ' * 20}" for i in range(1000))))
    changes = {"train_urls": ["large.jsonl"], "split_bytes": 300_000}
    build_cache(config(**changes), "train")
    return changes


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "not complete"])
def test_an_edit_of_equal_length_in_the_middle_is_noticed(work, large, complete):
    if not complete:
        (work / "cache/train/manifest.json").unlink()
    edit_middle(work / "large.jsonl")
    assert "large.jsonl from byte 0 has changed since it was cached" in refusal(config(**large))


def test_a_file_with_another_time_is_read_once_and_its_cache_is_used(work, large, caplog):
    caplog.set_level("INFO")
    before, cache = finished_manifest(**large), work / "cache/train"
    os.utime(work / "large.jsonl", ns=(1, 1))
    build_cache(config(**large), "train")
    after = load_manifest(str(cache))
    assert [shard.sha256 for shard in after.shards] == [shard.sha256 for shard in before.shards]
    assert [shard.source["modified"] for shard in after.shards] == [1, 1]
    source_checksums.cache_clear()
    assert finished_manifest(**large) == after
    assert sum("comparing its content" in record.getMessage() for record in caplog.records) == 1


def test_a_copy_is_the_same_data_whatever_its_time_unless_a_part_of_it_differs(work, large):
    (work / "moved").mkdir()
    copy = work / "moved" / "large.jsonl"
    shutil.copyfile(work / "large.jsonl", copy)
    moved = large | {"train_urls": ["moved/large.jsonl"]}
    assert finished_manifest(**moved).tokens == finished_manifest(**large).tokens
    content = copy.read_bytes()
    copy.write_bytes(content[:6000] + content[6000:-6000].replace(b"line", b"LINE") + content[-6000:])
    assert "moved/large.jsonl from byte 0 is a source of this config" in refusal(config(**moved))


def test_a_cache_of_an_earlier_version_knows_neither_times_nor_checksums(work, large):
    path = work / "cache/train/manifest.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        for name in ("modified", "sample", "sha256"):
            del shard["source"][name]
    path.write_text(json.dumps(manifest))
    before = path.read_bytes()
    edit_middle(work / "large.jsonl")
    assert finished_manifest(**large) == load_manifest(str(work / "cache/train"))
    assert path.read_bytes() == before
    identity = find_cache(config(**large), "train").identity
    shutil.rmtree(work / "cache")
    assert find_cache(config(**large), "train").identity == identity


def test_a_file_that_is_modified_while_it_is_read_is_an_error(work, monkeypatch):
    job = next(iter(find_cache(config(), "train").missing.values()))
    (work / "cache/train").mkdir(parents=True)
    with pytest.raises(UserError, match=r"a\.jsonl: modified while it was read"):
        build_shard(job, lambda *_: edit_middle(work / "a.jsonl", time=5))
    assert not list((work / "cache/train").glob("*.json"))


def test_only_a_finished_cache_is_used_without_its_sources(work, cache):
    for name in NAMES:
        (work / name).unlink()
    assert finished_manifest() == load_manifest(str(cache))
    with pytest.raises(UserError, match=r"no such file: z\.jsonl"):
        find_cache(config(train_urls=["z.jsonl"]), "train")
    assert "enforce_eos" in refusal(config(enforce_eos=False))
    (cache / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no such file: a\.jsonl, b\.jsonl, c\.jsonl$"):
        find_cache(config(), "train")


def test_a_cache_dir_that_is_a_file_or_not_utf8_is_an_error_before_anything_is_built(work, monkeypatch):
    with pytest.raises(UserError, match=r"data\.cache_dir: a\.jsonl/train"):
        find_cache(config(cache_dir="a.jsonl"), "train")
    folder = os.fsdecode(b"d\xe9")
    monkeypatch.setenv("HOME", folder)
    with pytest.raises(UserError, match=r"d.*not UTF-8.*data\.cache_dir"):
        make_folder(find_cache(config(cache_dir="~"), "train").folder)
    assert not os.path.exists(folder)


def test_a_missing_special_token_is_an_error_before_anything_is_written(work):
    (work / "tok" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="no eos_token"):
        find_cache(config(), "train")
    assert not (work / "cache").exists()


@pytest.mark.parametrize("documents", ["line", "blank_line", "file"])
def test_a_large_txt_is_split_only_if_documents_are_lines(work, documents):
    (work / "a.txt").write_text("a line of text\n" * 200_000)
    found = find_cache(config(train_urls=["a.txt"], text_documents=documents, split_bytes=1_000_000), "train")
    assert len(found.jobs) == (3 if documents == "line" else 1)
    # the recipe omits text_documents for lines, as in caches built before the setting existed
    assert ("text_documents" in found.recipe["documents"]) == (documents != "line")
