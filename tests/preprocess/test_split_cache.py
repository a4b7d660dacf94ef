"""Caches on disk: used, used in part, or refused."""

import shutil

import pytest
from preprocess.conftest import NAMES, config, contents, lines

from lmtrain.config.errors import UserError
from lmtrain.data.cache_manifest import load_manifest
from lmtrain.hf.learn_tokenizer import learn_bpe
from lmtrain.hf.tokenizer import load_tokenizer, save_tokenizer
from lmtrain.preprocess.split_cache import find_cache


def refusal(wanted):
    with pytest.raises(UserError) as error:
        find_cache(wanted, "train")
    message = str(error.value)
    assert message.startswith("cache/train: ")
    assert "choose another data.cache_dir, or delete this folder" in message
    return message


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
    assert (
        f"tokenizer.fingerprint: the cache has '{ours.fingerprint}', this config has '{theirs.fingerprint}'" in message
    )
    assert f"tokenizer.vocab_size: the cache has {ours.vocab_size}, this config has {theirs.vocab_size}" in message


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"text_key": "body"}, "documents.text_key: the cache has 'text', this config has 'body'"),
        # the recipe omits the default, as in caches built before the setting existed
        ({"text_documents": "file"}, "documents.text_documents: the cache has nothing, this config has 'file'"),
        ({"train_urls": ["b.jsonl", "a.jsonl", "c.jsonl"]}, "the list of sources has another order or length"),
    ],
)
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "not complete"])
def test_a_cache_of_other_settings_or_sources_is_refused(work, cache, change, line, complete):
    if not complete:
        (cache / "manifest.json").unlink()
    before = contents(cache)
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


def test_a_cache_dir_that_is_a_file_is_a_user_error(work):
    with pytest.raises(UserError, match=r"data\.cache_dir: a\.jsonl/train cannot be created: a file is in its place"):
        find_cache(config(cache_dir="a.jsonl"), "train")


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
