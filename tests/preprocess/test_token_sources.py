"""Token ids of other systems give the batches that a cache of the same documents gives, and errors name the place."""

import os
import subprocess
import sys

import numpy as np
import pytest
from cache_building import build_cache, open_built
from pydantic import ValidationError
from token_files import EOS, begun, documents, ended, llm_c, megatron, nano_gpt, numpy_array
from token_windows import SEQ_LEN, assert_same, config, expected, rows, windows

from lmtrain.data.cache_manifest import Shards
from lmtrain.data.caches import open_store
from lmtrain.data.config import DataConfig
from lmtrain.data.token_store import document_starts
from lmtrain.data.verification import verify
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.show import first_documents
from lmtrain.preprocess.sources import list_sources
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.runtime.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRITERS = {
    "nano.bin": (nano_gpt, {}, {}),
    "wide.bin": (nano_gpt, {"dtype": "<u4"}, {"format": {"dtype": "uint32"}}),
    "llmc.bin": (llm_c, {}, {}),
    "llama.bin": (llm_c, {"dtype": "<u4"}, {}),
    "megatron.bin": (megatron, {}, {}),
    "sentences.bin": (megatron, {"dtype": "<i4", "sentences": 3}, {}),
    "long.bin": (megatron, {"dtype": "<i8"}, {}),
    "olmo.npy": (nano_gpt, {}, {}),
    "saved.npy": (numpy_array, {}, {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_are_read_in_place(folder, name):
    write, how, settings = WRITERS[name]
    docs = documents()
    write(folder / name, docs, **how)
    assert_same(windows(config(name, **settings)), expected(docs, write is llm_c))
    assert os.listdir("cache/train") == ["manifest.json"]


def test_a_cache_by_its_path_is_read_in_place(folder):
    docs = documents()
    rows(docs)
    first = windows(config("rows.parquet"))
    assert_same(windows(config("cache/train", cache_dir="other")), first)
    assert os.listdir("other/train") == ["manifest.json"]
    with pytest.raises(UserError, match=r"cache/train.*tokenizer"):
        find_cache(config("cache/train", cache_dir="third", tokenizer="passthrough", vocab_size=300), "train")


def test_files_of_several_kinds_are_one_source(folder):
    parts = [documents(seed) for seed in range(3)]
    nano_gpt(folder / "a.bin", parts[0])
    rows(parts[1])
    megatron(folder / "c.bin", parts[2])
    wanted = config("a.bin", "rows.parquet", "c.bin")
    assert_same(windows(wanted), expected([*parts[0], *parts[1], *parts[2]]))
    assert find_cache(wanted, "train").shards.infos[1].file == "shard-00001-of-00003.arrayrecord"


def test_documents_continue_in_the_next_file_of_llm_c(folder):
    docs = documents()
    ids = begun(docs)
    for number, part in enumerate(np.array_split(ids, 3)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(part)
        (folder / f"{number}.bin").write_bytes(header.tobytes() + part.astype("<u2").tobytes())
    assert_same(windows(config("{0..2}.bin")), expected(docs, eos_first=True))


def test_megatron_s_documents_that_cross_blocks_of_the_reader(folder):
    docs = documents(number=300)
    megatron(folder / "big.bin", docs)
    wanted = config("big.bin")
    store = open_built(wanted)
    starts, size = np.array([0, 10_000]), 30_000
    tokens, begins, _ = store.read(starts, size)
    ids, ends = ended(docs), np.cumsum([len(document) + 1 for document in docs])
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(tokens[row], ids[start : start + size])
        right = ends[(ends > start) & (ends < start + size)] - start
        np.testing.assert_array_equal(1 + np.flatnonzero(begins[row, 1:]), right)
    assert document_starts(lambda *_: begins[:0], begins, 0)[row].max() == right[-1]


def test_an_id_that_is_not_in_the_vocabulary_is_named_with_its_place(folder):
    docs = documents(vocab=200)
    docs[10][0] = 999
    place = sum(len(document) + 1 for document in docs[:10])
    nano_gpt(folder / "a.bin", docs)
    llm_c(folder / "b.bin", docs)
    rows(docs)
    for name, where in (
        ("a.bin", rf"a\.bin: token id 999 at byte {2 * place:,} .*257"),
        ("b.bin", rf"b\.bin: token id 999 at byte {1024 + 2 * (place + 1):,} "),
        ("rows.parquet", r"^rows\.parquet:11: token id 999 "),
    ):
        with pytest.raises(UserError, match=where):
            windows(config(name, cache_dir=name[0]))


@pytest.mark.parametrize("change", ["content", "shorter", "index", "index only", "deleted"])
def test_a_file_that_changes_is_refused_by_the_run_and_by_a_resumed_one(folder, change):
    docs = documents(vocab=200)
    megatron(folder / "a.bin", docs)
    wanted = config("a.bin")
    store = open_built(wanted)
    store.read(np.array([0]), SEQ_LEN)
    other_borders = [docs[0][:-1], np.append(docs[0][-1], docs[1]), *docs[2:]]
    name = "a.idx" if change == "index only" else "a.bin"
    if change == "deleted":
        os.remove(name)
    else:
        written = {"shorter": docs[:-1], "content": [ids ^ 1 for ids in docs]}.get(change, other_borders)
        megatron(folder / ("b.bin" if change == "index only" else "a.bin"), written)
        if change == "index only":
            os.replace("b.idx", name)
        os.utime(name, ns=(0, 0))
    with pytest.raises(UserError, match=rf"{name}: .*changed"):
        store.read(np.array([0]), SEQ_LEN)
    with pytest.raises(UserError, match=r"a.bin has changed since it was cached|no such file: a.bin"):
        find_cache(wanted, "train")


def test_a_file_whose_time_changes_is_read_on_and_that_is_logged_once(folder, caplog):
    caplog.set_level("INFO", "lmtrain")
    docs = documents()
    megatron(folder / "a.bin", docs)
    wanted = config("a.bin")
    build_cache(wanted, "train")

    def logged():
        said = [record.message for record in caplog.records if "modification time" in record.message]
        caplog.clear()
        return [os.path.basename(message.partition(":")[0]) for message in said]

    stores = [open_store(wanted, find_cache(wanted, "train")) for _ in range(2)]
    before = stores[0].read(np.array([0]), SEQ_LEN)
    for name in ("a.bin", "a.idx"):
        os.utime(name, ns=(0, 0))
    for store in stores:
        assert_same(store.read(np.array([0]), SEQ_LEN), before)
    assert logged() == ["a.bin", "a.idx"]
    build_cache(wanted, "train")
    assert logged() == ["a.bin"]
    build_cache(wanted, "train")
    assert logged() == []


def test_an_index_next_to_the_file_that_a_link_names_is_used(folder):
    docs = documents(vocab=200)
    (folder / "store").mkdir()
    megatron(folder / "store" / "a.bin", docs, sentences=2)
    os.symlink("store/a.bin", "link.bin")
    cache = find_cache(config("link.bin", format={"eos_id": 7}), "train")
    assert cache.shards.infos[0].documents == len(docs)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("a.bin", {}, []),
        ("a.bin", {"eos_id": 200}, ["a.bin", "data.format.eos_id", ".idx"]),
        ("m.bin", {}, []),
        ("m.bin", {"eos_id": 200}, ["data.format.eos_id"]),
        ("m.bin", {"eos_at": "last"}, ["data.format.eos_at"]),
        ("a.bin", {"input_ids_field": "ids"}, ["data.format.input_ids_field"]),
        ("rows.jsonl", {"dtype": "uint32"}, ["data.format.dtype"]),
    ],
)
def test_settings_without_effect_and_files_without_eos_are_logged(folder, caplog, name, settings, words):
    docs = documents(vocab=199)
    nano_gpt(folder / "a.bin", docs)
    megatron(folder / "m.bin", docs)
    rows(docs)
    find_cache(config(name, format=settings), "train")
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == bool(words)
    assert all(word in messages[0] for word in words)


def test_copies_in_another_folder_are_used(folder):
    docs = documents()
    megatron(folder / "a.bin", docs)
    first = windows(config("a.bin"))
    os.mkdir("moved")
    for name in ("a.bin", "a.idx"):
        os.rename(name, f"moved/{name}")
    os.utime("moved/a.bin", ns=(0, 0))
    assert_same(windows(config("moved/a.bin")), first)
    with pytest.raises(UserError, match=r"no such file: a.bin"):
        find_cache(config("a.bin"), "train")


@pytest.mark.parametrize(
    ("write", "file", "size", "message"),
    [
        (nano_gpt, "a.bin", 1001, "a.bin: .*1,001 bytes"),
        (llm_c, "a.bin", 3000, "a.bin: truncated"),
        (megatron, "a.bin", 3000, "a.bin: has 3,000 bytes.*a.idx"),
        (megatron, "a.idx", 500, "a.idx: truncated"),
        (megatron, "a.idx", 5, "a.idx: not an index"),
        (numpy_array, "a.npy", 4000, r"a.npy: truncated"),
    ],
)
def test_truncated_files_are_refused(folder, write, file, size, message):
    name = file.replace("idx", "bin")
    write(folder / name, documents())
    os.truncate(file, size)
    with pytest.raises(UserError, match=message):
        find_cache(config(name), "train")


def without_index(path, docs):
    megatron(path, docs, dtype="<i4")
    os.remove(path.with_suffix(".idx"))


def other_version(path, docs):
    llm_c(path, docs)
    content = bytearray(path.read_bytes())
    content[4] = 3
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("write", "settings", "message"),
    [
        (lambda path, docs: nano_gpt(path, docs, "<u4"), {}, "data.format.dtype: uint32"),
        (without_index, {}, "data.format.dtype: uint32.*put its .idx next to it"),
        (nano_gpt, {"dtype": "uint32"}, "data.format.dtype: uint16"),
        (other_version, {}, "of version 3"),
        (lambda path, docs: path.write_text("1 2 3\n" * 100), {}, "looks like text"),
        (lambda path, docs: path.write_bytes(b""), {}, "is empty"),
    ],
)
@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
def test_files_of_another_kind_are_refused(folder, name, write, settings, message):
    write(folder / name, documents())
    with pytest.raises(UserError, match=f"{name}: .*{message}"):
        find_cache(config(name, format=settings), "train")


def test_a_corrupt_index_is_found_before_there_is_a_cache_and_in_one_that_exists(folder):
    megatron(folder / "a.bin", documents())
    wanted = config("a.bin")
    content = bytearray((folder / "a.idx").read_bytes())
    content[-16:-8] = bytes(8)  # the last but one document begins at sequence 0
    (folder / "a.idx").write_bytes(content)
    (source,) = list_sources(wanted, "train", open_tokenizer("byte"))
    shards = Shards.of_one(source.info)
    verify(str(folder / "cache"), shards)  # as of a cache that an earlier version made
    for read in (lambda: find_cache(wanted, "train"), lambda: list(first_documents(wanted, SEQ_LEN, 1)), shards.check):
        with pytest.raises(UserError, match=r"a.idx: .*document 59 "):
            read()


def test_what_is_missing_is_asked_for(folder):
    docs = documents()
    nano_gpt(folder / "a.bin", docs)
    megatron(folder / "b_text_document.bin", docs)
    without_eos = {"tokenizer": "passthrough", "vocab_size": 300, "enforce_eos": False}
    assert_same(windows(config("a.bin", format={"eos_id": EOS}, **without_eos)), expected(docs))
    assert_same(windows(config("b_text_document.bin", cache_dir="b", **without_eos)), expected(docs))
    for name, changes, named in (
        ("a.bin", {"cache_dir": "d", **without_eos}, r"a.bin: .*data.format.eos_id"),
        ("a.bin", without_eos | {"vocab_size": 100_000}, r"100,000.*data.format.dtype"),
        ("b_text_document.bin", {"format": {"dtype": "uint32"}}, r"b_text_document.bin: .*uint16"),
        ("b_text_document", {}, r"b_text_document.bin"),
        ("b_text_document.idx", {}, r"b_text_document.idx: .*.bin"),
    ):
        with pytest.raises(UserError, match=named):
            find_cache(config(name, **{"cache_dir": "c", **changes}), "train")
    for changes, named in (({"text_key": "ids"}, "format.input_ids_field"), ({"enforce_bos": True}, "enforce_bos")):
        with pytest.raises(ValidationError, match=named):
            config("a.bin", **changes)
    with pytest.raises(UserError, match=r"data.format: {type: tokens}"):
        find_cache(DataConfig(train_urls=["a.bin"], tokenizer="byte", cache_dir="c"), "train")


def test_labels_in_some_files_only_are_refused(folder):
    docs = documents()
    nano_gpt(folder / "a.bin", docs)
    rows(docs, loss_mask=[[1] * (len(ids) + 1) for ids in docs])
    with pytest.raises(UserError, match=r"rows.parquet .*labels.* a.bin"):
        find_cache(config("a.bin", "rows.parquet"), "train")


_PEERS = """
import sys
import numpy as np
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from token_files import EOS, documents
import torch

theirs = MegatronTokenizedFile(".", "datatrove", token_size=2)
for kind in (np.uint16, np.int32):
    builder = IndexedDatasetBuilder(f"megatron-{kind.__name__}.bin", dtype=kind)
    for ids in documents():
        ended = np.append(ids, EOS)
        builder.add_document(torch.tensor(ended, dtype=torch.int64), [len(ended)])
    builder.finalize(f"megatron-{kind.__name__}.idx")
builder = IndexedDatasetBuilder("several.bin", dtype=np.uint16, multimodal=True)
for number, ids in enumerate(documents()):
    ended = torch.tensor(np.append(ids, EOS), dtype=torch.int64)
    if number % 2:
        builder.add_document(ended, [len(ended) // 2, 0, len(ended) - len(ended) // 2], [0, 1, 0])
    else:
        builder.add_item(ended)
        builder.end_document()
builder.end_document()
builder.finalize("several.idx")
merged = IndexedDatasetBuilder("merged.bin", dtype=np.uint16, multimodal=True)
merged.add_index("several")
merged.finalize("merged.idx")
for ids in documents():
    theirs.write([*ids.tolist(), EOS])
theirs.close()
"""


@pytest.mark.long
def test_files_that_megatron_core_and_datatrove_write(folder):
    path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", _PEERS], check=True, env={**os.environ, "PYTHONPATH": path})
    right = expected(documents())
    for name in ("megatron-uint16", "megatron-int32", "several", "merged", "datatrove"):
        assert_same(windows(config(f"{name}.bin", cache_dir=name)), right)
