"""Large files read in parts: every line once, in order, with its line number in the file."""

import json

import pytest

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.build import build_cache
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.sources import describe_source, list_sources, split_source

LINES = [f'{{"text": "line {i} {"x" * (i * 37 % 90)}"}}' for i in range(60)]


@pytest.fixture(params=["\n", "\r\n"], ids=["unix", "windows"])
def file(tmp_path, request):
    path = tmp_path / "a.jsonl"
    path.write_bytes(request.param.join(LINES).encode())  # no line break at the end
    return str(path)


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 100, 1000, 10**6])
def test_parts_of_any_size_give_every_document_once_in_order(file, part_bytes):
    parts = split_source(describe_source(file), part_bytes)
    texts = [text for part in parts for _, text in DocumentReader(part, "text")]
    assert texts == [json.loads(line)["text"] for line in LINES]
    assert sum(part.bytes for part in parts) == describe_source(file).bytes
    assert max(part.bytes for part in parts) <= max(part_bytes, 1) or len(parts) == 1


@pytest.mark.parametrize("skip", [False, True])
def test_a_bad_line_is_named_by_its_line_number_in_the_file(tmp_path, skip):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*LINES[:41], "{broken", *LINES[41:]]) + "\n")
    parts = split_source(describe_source(str(path)), 500)
    assert len(parts) > 5
    if skip:
        readers = [DocumentReader(part, "text", skip_bad=True) for part in parts]
        assert sum(1 for reader in readers for _ in reader) == 60
        (message,) = [line for reader in readers for line in reader.bad_records]
        assert message.startswith(f"{path}:42: not JSON")
    else:
        with pytest.raises(UserError, match=r"a\.jsonl:42: not JSON"):
            [list(DocumentReader(part, "text")) for part in parts]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.parquet"])
def test_other_formats_are_not_split(tmp_path, name):
    (tmp_path / name).write_bytes(b"x" * 1000)
    source = describe_source(str(tmp_path / name))
    assert split_source(source, 10) == [source]


def test_a_split_file_has_the_tokens_of_the_unsplit_file(file, tmp_path, settings):
    def build(name, **changes):
        tokenizer = settings["data"]["tokenizer"]
        config = DataConfig(train_urls=[file], tokenizer=tokenizer, cache_dir=str(tmp_path / name), **changes)
        return build_cache(config, "train"), config

    whole, _ = build("whole")
    parts, config = build("parts", split_bytes=700, num_preprocess_workers=1)
    assert len(whole.shards) == 1
    assert len(parts.shards) == len(list_sources(config, "train")) > 3
    assert (parts.tokens, parts.documents) == (whole.tokens, whole.documents)
    with pytest.raises(UserError, match=r"a\.jsonl from byte 700 is in the cache, but no source of this config"):
        build_cache(config.model_copy(update={"split_bytes": 10**6}), "train")


def test_passthrough_stores_token_ids_unchanged(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"ids": [1, 2, 3]}\n{"ids": []}\n{"ids": [69999]}\n')
    settings = {"train_urls": [str(path)], "text_key": "ids", "tokenizer": "passthrough", "enforce_eos": False}
    config = DataConfig(**settings, vocab_size=70_000, cache_dir=str(tmp_path / "cache"))
    manifest = build_cache(config, "train")
    assert (manifest.tokens, manifest.documents, manifest.dtype) == (4, 3, "<u4")
    assert manifest.recipe["tokenizer"] == {"fingerprint": "passthrough", "vocab_size": 70_000}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"ids": [1, 7]}', "token id 7 is not below data.vocab_size 7"),
        ('{"ids": [-1]}', "token id -1 is not below data.vocab_size 7"),
        ('{"ids": "text"}', "'ids' is not a list of token ids"),
        ('{"ids": [1.0]}', "'ids' is not a list of token ids"),
        ('{"ids": [true]}', "'ids' is not a list of token ids"),
    ],
)
def test_an_invalid_token_id_is_an_error_with_its_location(tmp_path, record, message):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"ids": [1]}\n' + record + "\n")
    with pytest.raises(UserError) as caught:
        list(DocumentReader(str(path), "ids", vocab_size=7))
    assert str(caught.value).startswith(f"{path}:2: {message}")
