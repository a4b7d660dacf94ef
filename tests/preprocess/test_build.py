"""Builds of one split's cache: built, resumed, reused, or refused."""

import json
import shutil

import pytest

from lmtrain.config.errors import UserError
from lmtrain.data.cache_manifest import load_manifest
from lmtrain.data.config import DataConfig
from lmtrain.data.shards import Shards
from lmtrain.data.token_store import TokenStore
from lmtrain.hf.learn_tokenizer import learn_bpe
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer
from lmtrain.preprocess.build import build_cache
from lmtrain.preprocess.sources import list_sources

NAMES = ["a.jsonl", "b.jsonl", "c.jsonl"]


def lines(*texts):
    return "".join(json.dumps({"text": text, "body": text}) + "\n" for text in texts)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mtimes(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Sources and a tokenizer; never modified, tests get copies."""
    root = tmp_path_factory.mktemp("original")
    for name, repeat in zip(NAMES, (300, 3, 40), strict=True):
        (root / name).write_text(lines(*(f"{name} has the line {i}" for i in range(repeat))))
    save_tokenizer(learn_bpe(["the line has"], 270), str(root / "tok"), eos="<|endoftext|>", bos="<|endoftext|>")
    return root


@pytest.fixture
def work(original, tmp_path, monkeypatch):
    """A copy of `original` as the working folder, so that the relative paths of the config refer to the copy."""
    folder = tmp_path / "work"
    shutil.copytree(original, folder)
    monkeypatch.chdir(folder)
    return folder


def config(**changes):
    return DataConfig(**{"train_urls": NAMES, "tokenizer": "tok", "num_preprocess_workers": 1, **changes})


@pytest.fixture
def cache(work, finished):
    shutil.copytree(finished, work / "cache" / "train")
    return work / "cache" / "train"


@pytest.fixture(scope="module")
def finished(original, tmp_path_factory):
    """The cache of an uninterrupted build by one worker."""
    copy = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(original)
        build_cache(config(cache_dir=str(copy)), "train")
    return copy / "train"


def refusal(wanted):
    with pytest.raises(UserError) as error:
        build_cache(wanted, "train")
    message = str(error.value)
    assert message.startswith("cache/train: ")
    assert "choose another data.cache_dir, or delete this folder" in message
    return message


def test_the_cache_has_the_tokens_of_all_files_in_order(work, cache):
    manifest = load_manifest(str(cache))
    tokenizer = load_tokenizer("tok")
    documents = [json.loads(line)["text"] for name in NAMES for line in (work / name).read_text().splitlines()]
    expected = [i for text in documents for i in [*tokenizer.backend.encode(text).ids, tokenizer.eos_id]]
    assert (manifest.documents, manifest.tokens) == (343, len(expected))
    store = TokenStore("train", Shards.of(manifest), manifest.dtype, lambda info: str(cache / info.file))
    assert store.read(_first(), len(expected))[0][0].tolist() == expected


def _first():
    import numpy as np

    return np.array([0])


def test_two_workers_give_the_bytes_of_one(work, finished):
    build_cache(config(num_preprocess_workers=2), "train")
    assert contents(work / "cache" / "train") == contents(finished)


def test_a_finished_cache_is_not_modified(cache):
    before = mtimes(cache)
    build_cache(config(), "train")
    assert mtimes(cache) == before


@pytest.mark.parametrize("lost", [["shard-00001-of-00003.json"], ["shard-00000-of-00003.arrayrecord"]], ids=str)
def test_only_missing_shards_are_rebuilt(cache, finished, lost):
    for name in ["manifest.json", *lost]:
        (cache / name).unlink()
    (cache / "shard-00002-of-00003.arrayrecord.tmp-1").write_bytes(b"left by a killed worker")
    before = mtimes(cache)
    build_cache(config(), "train")
    assert contents(cache) == contents(finished)
    stem = lost[0].split(".")[0]
    kept = [name for name in contents(finished) if name != "manifest.json" and not name.startswith(stem)]
    assert {name: mtimes(cache)[name] for name in kept} == {name: before[name] for name in kept}


def test_a_truncated_shard_is_rebuilt(cache, finished):
    (cache / "manifest.json").unlink()
    shard = cache / "shard-00000-of-00003.arrayrecord"
    shard.write_bytes(shard.read_bytes()[:-1])
    build_cache(config(), "train")
    assert contents(cache) == contents(finished)


def test_a_corrupt_marker_does_not_stop_the_build(cache, finished):
    (cache / "manifest.json").unlink()
    (cache / "shard-00000-of-00003.json").write_bytes(b"\x00\x00")
    build_cache(config(), "train")
    assert contents(cache) == contents(finished)


def test_another_tokenizer_is_refused(work, cache):
    save_tokenizer(learn_bpe(["other words"], 265), "other", eos="<|endoftext|>", bos="<|endoftext|>")
    ours, theirs = load_tokenizer("tok"), load_tokenizer("other")
    message = refusal(config(tokenizer="other"))
    assert (
        f"tokenizer.fingerprint: the cache has '{ours.fingerprint}', this config has '{theirs.fingerprint}'" in message
    )
    assert f"tokenizer.vocab_size: the cache has {ours.vocab_size}, this config has {theirs.vocab_size}" in message


def test_the_same_tokenizer_in_another_folder_is_not_another_tokenizer(work, cache):
    shutil.copytree("tok", "elsewhere")
    before = mtimes(cache)
    build_cache(config(tokenizer="elsewhere"), "train")
    assert mtimes(cache) == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"enforce_eos": False}, "documents.enforce_eos: the cache has True, this config has False"),
        ({"enforce_bos": True}, "documents.enforce_bos: the cache has False, this config has True"),
        ({"text_key": "body"}, "documents.text_key: the cache has 'text', this config has 'body'"),
        ({"train_urls": NAMES[:2]}, "c.jsonl is in the cache, but no source of this config"),
        ({"train_urls": [*NAMES, "d.jsonl"]}, "d.jsonl is a source of this config, but not in the cache"),
        ({"train_urls": ["b.jsonl", "a.jsonl", "c.jsonl"]}, "the sources are the same, in another order"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "not complete"])
def test_a_cache_of_other_settings_or_sources_is_refused(work, cache, change, line, complete):
    (work / "d.jsonl").write_text(lines("more"))
    if not complete:
        (cache / "manifest.json").unlink()
        if "url" in str(change) and "c.jsonl is in" not in line:
            line = "has another index in the list of sources"  # shards do not know the other sources
    before = contents(cache)
    assert line in refusal(config(**change))
    assert contents(cache) == before


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "not complete"])
def test_a_changed_source_is_refused(work, cache, complete):
    if not complete:
        (cache / "manifest.json").unlink()
    (work / "b.jsonl").write_text(lines("other text"))
    assert "  b.jsonl has changed since it was cached\n" in refusal(config())


def test_the_files_of_a_finished_cache_may_move_to_another_folder(work, cache):
    moved = work / "moved"
    moved.mkdir()
    for name in NAMES:
        shutil.move(work / name, moved / name)
    urls = [f"moved/{name}" for name in NAMES]
    assert build_cache(config(train_urls=urls), "train") == load_manifest(str(cache))
    (moved / "b.jsonl").write_text(lines("other text"))
    assert "moved/b.jsonl is a source of this config, but not in the cache" in refusal(config(train_urls=urls))


def test_a_finished_cache_is_used_without_its_sources(work, cache):
    for name in NAMES:
        (work / name).unlink()
    assert build_cache(config(), "train") == load_manifest(str(cache))
    with pytest.raises(UserError, match=r"no such file: z\.jsonl"):
        build_cache(config(train_urls=["z.jsonl"]), "train")
    assert "enforce_eos" in refusal(config(enforce_eos=False))


def test_an_unfinished_cache_needs_its_sources(work, cache):
    (cache / "manifest.json").unlink()
    (work / "b.jsonl").unlink()
    with pytest.raises(UserError, match=r"no such file: b\.jsonl$"):
        build_cache(config(), "train")


def test_a_bad_line_is_named_and_the_build_resumes_after_a_fix(work, finished):
    good = (work / "c.jsonl").read_text()
    (work / "c.jsonl").write_text(good + "not json\n")
    folder = work / "cache" / "train"
    with pytest.raises(UserError, match=r"^c\.jsonl:41: not JSON"):
        build_cache(config(), "train")
    assert not (folder / "manifest.json").exists()
    assert not (folder / "shard-00002-of-00003.json").exists()
    (work / "c.jsonl").write_text(good)
    build_cache(config(), "train")
    assert contents(folder) == contents(finished)


@pytest.mark.parametrize("cache_dir", ["a.jsonl"])
def test_a_cache_dir_that_is_a_file_is_a_user_error(work, cache_dir):
    with pytest.raises(UserError, match=cache_dir):
        build_cache(config(cache_dir=cache_dir), "train")


def test_a_cache_in_the_home_folder_is_found(work, monkeypatch):
    monkeypatch.setenv("HOME", str(work / "home"))
    build_cache(config(cache_dir="~/cache", train_urls=["b.jsonl"]), "train")
    assert (work / "home" / "cache" / "train" / "manifest.json").exists()


def test_a_missing_special_token_is_an_error_before_anything_is_written(work):
    (work / "tok" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="no eos_token"):
        build_cache(config(), "train")
    assert not (work / "cache").exists()


def test_skipped_records_are_counted_and_logged_and_change_nothing_else(work, finished, caplog):
    (work / "b.jsonl").write_text("{broken\n" + (work / "b.jsonl").read_text() + '{"txt": 1}\n')
    manifest = build_cache(config(on_bad_record="skip", max_bad_fraction=0.5), "train")
    assert (manifest.skipped, [shard.skipped for shard in manifest.shards]) == (2, [0, 2, 0])
    (warning,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert warning.startswith("preprocess train: skipped 2 bad records\n  b.jsonl:1: not JSON")
    assert "  b.jsonl:5: no key 'text'" in warning
    for shard in manifest.shards:
        assert (work / "cache" / "train" / shard.file).read_bytes() == (finished / shard.file).read_bytes()


def test_too_many_bad_records_are_an_error_that_shows_the_first(work):
    (work / "b.jsonl").write_text("{broken\n" * 50 + lines("a", "b"))
    with pytest.raises(UserError) as caught:
        build_cache(config(on_bad_record="skip", max_bad_fraction=0.9), "train")
    first, *rest = str(caught.value).splitlines()
    assert first == ("b.jsonl: 50 of 52 records are bad, more than data.max_bad_fraction 0.9; the first are")
    assert len(rest) == 10
    assert rest[0].startswith("  b.jsonl:1: not JSON")
    assert load_manifest("cache/train") is None


def test_skip_and_error_have_different_recipes(cache):
    with pytest.raises(UserError, match=r"documents.on_bad_record: the cache has 'error', this config has 'skip'"):
        build_cache(config(on_bad_record="skip"), "train")


def test_a_too_long_document_that_cannot_be_split_is_an_error_with_its_location(work):
    tokenizer = json.loads((work / "tok" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "NFC"}
    (work / "tok" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (work / "b.jsonl").write_text(lines("short", "ü " * 300))
    with pytest.raises(
        UserError, match=r"b\.jsonl:2: a document of 900 bytes is longer than data\.max_document_bytes 500"
    ):
        build_cache(config(max_document_bytes=500), "train")
    assert build_cache(config(max_document_bytes=900), "train").documents == 342


def test_every_format_and_compression_gives_the_same_tokens(work, finished):
    import pyarrow
    from pyarrow import parquet

    texts = [[json.loads(line)["text"] for line in (work / name).read_text().splitlines()] for name in NAMES]
    (work / "a.txt").write_text("\n".join(texts[0]))
    (work / "b.json").write_text(json.dumps([{"text": text} for text in texts[1]], indent=2))
    parquet.write_table(pyarrow.table({"text": texts[2]}), work / "c.parquet")
    manifest = build_cache(config(train_urls=["a.txt", "b.json", "c.parquet"]), "train")
    whole = load_manifest(str(finished))
    assert [shard.sha256 for shard in manifest.shards] == [shard.sha256 for shard in whole.shards]


def test_a_finished_cache_of_a_dataset_is_used_without_opening_the_dataset(work):
    (work / "data").mkdir()
    for name in NAMES:
        shutil.copyfile(work / name, work / "data" / f"train-{name}")
    settings = {"train_urls": None, "id": str(work / "data"), "stream": True}
    built = build_cache(config(**settings), "train")
    whole = load_manifest("cache/train")
    assert built == whole
    assert [shard.documents for shard in built.shards] == [300, 3, 40]
    shutil.rmtree(work / "data")
    assert build_cache(config(**settings), "train") == built
    with pytest.raises(UserError, match="not found locally"):
        build_cache(config(**settings | {"stream": False}), "train")


def test_text_documents_divides_a_txt_and_old_caches_stay_valid(work):
    """The recipe omits text_documents for lines, as in caches built before the setting existed."""
    (work / "a.txt").write_text("one\ntwo\n\nthree\n")
    (work / "b.txt").write_text("four\n\n\nfive\nsix\n")
    counts = {}
    for documents in ("line", "blank_line", "file"):
        made = config(
            train_urls=["a.txt", "b.txt"], cache_dir=documents, text_documents=documents, split_bytes=1_000_000
        )
        manifest = build_cache(made, "train")
        counts[documents] = [shard.documents for shard in manifest.shards]
        assert ("text_documents" in manifest.recipe["documents"]) == (documents != "line")
    assert counts == {"line": [3, 3], "blank_line": [2, 2], "file": [1, 1]}
    with pytest.raises(UserError, match=r"documents\.text_documents"):
        build_cache(config(train_urls=["a.txt", "b.txt"], cache_dir="file", text_documents="blank_line"), "train")


@pytest.mark.parametrize("documents", ["blank_line", "file"])
def test_a_large_txt_is_not_split_unless_documents_are_lines(work, documents):
    (work / "a.txt").write_text("a line of text\n" * 200_000)
    made = config(train_urls=["a.txt"], text_documents=documents, split_bytes=1_000_000)
    assert len(list_sources(made, "train")) == 1
    assert len(list_sources(config(train_urls=["a.txt"], split_bytes=1_000_000), "train")) > 1
