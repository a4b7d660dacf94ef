"""Documents of single records: what rows of token ids say is honoured or refused, and never passed over."""

import json

import numpy as np
import pytest
from token_files import EOS, documents
from token_windows import SEQ_LEN, assert_same, config, expected, rows, windows

from lmtrain.data.config import DataConfig
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.record_reader import TokenRows
from lmtrain.preprocess.records import BadRecordError, Texts, TokenIds, read_document
from lmtrain.preprocess.show import first_documents
from lmtrain.preprocess.sources import describe_source
from lmtrain.preprocess.split_cache import find_cache
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *((record, "expected a JSON object with the key 'text'") for record in (["text"], "text")),
        ({"body": "a", "id": 1}, "no key 'text' (it has 'body', 'id'); set data.text_key"),
        ({}, "no key 'text' (it has none)"),
        ({"messages": []}, "set data.format: {type: chat}"),
        ({"conversations": []}, "set data.format: {type: chat}"),
        ({"prompt": "a", "completion": "b"}, "set data.format: {type: completion}"),
        ({"text": None}, "'text' is NoneType, not text"),
        ({"text": ["a"]}, "'text' is list, not text"),
        ({"text": "half \ud83d"}, "not UTF-8: surrogates not allowed at character 5"),
    ],
    ids=str,
)
def test_a_record_without_text_is_an_error_that_names_the_setting(record, message):
    with pytest.raises(BadRecordError) as caught:
        read_document(Texts("text"), record)
    assert message in str(caught.value)


def test_token_ids_are_below_the_vocabulary_size():
    reader = TokenIds(key="ids", vocab_size=7)
    assert read_document(reader, {"ids": [0, 6]}) == [0, 6]
    for ids, named in (
        ([1, 7], "7 .*data.vocab_size 7"),
        ([-1], "-1 .*7"),
        *((x, "'ids'") for x in ("text", [1.0], [True])),
    ):
        with pytest.raises(BadRecordError, match=named):
            read_document(reader, {"ids": ids})


READER = TokenRows("input_ids", 100)
IDS = [5, 6, 7, 8]
NOT_IDS = [[5.0, 6.0], [5, True], [True, False], [5, None], [5, "6"], ["5", "6"], [[5, 6], [7, 8]], [[5, 6], [7]], [[]]]
NOT_IDS += [None, "5 6", b"\5\0", 5, {"0": 5}, [5, 1 << 63], [5, 1 << 70]]


@pytest.mark.parametrize(
    ("more", "ids", "targets"),
    [
        ({}, IDS, None),
        ({"attention_mask": [1, 1, 1, 0]}, [5, 6, 7], None),
        ({"attention_mask": [False, True, True, True]}, [6, 7, 8], None),
        ({"loss_mask": [0.0, 0.0, 1.0, 1.0]}, IDS, [0, 0, 1, 1]),
        ({"assistant_masks": [0, 1, 1, 1], "labels": [5, 6, 7, -100]}, IDS, [0, 1, 1, 0]),
        ({"labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}, [5, 6, 7], [0, 1, 1]),
        ({"position_ids": [0, 1, 2, 3], "token_type_ids": [0] * 4, "segment_ids": [1] * 4}, IDS, None),
        ({"position_ids": [1, 0, 1, 2], "attention_mask": [0, 1, 1, 1]}, [6, 7, 8], None),
        ({"position_ids": None, "labels": None, "loss_mask": None, "pixel_values": None}, IDS, None),
        ({"seq_lengths": [4], "cu_seqlens": [0, 4], "weight": 1.0, "loss_weights": [1, 1, 1, 1]}, IDS, None),
        ({"prompt_length": 2, "loss_mask": [0, 0, 1, 1]}, IDS, [0, 0, 1, 1]),
        ({"prompt_length": 0}, IDS, None),
        (
            {"special_tokens_mask": [0, 0, 0, 1], "length": 4, "id": 7, "text": "abcd", "tokens": list("abcd")},
            IDS,
            None,
        ),
        ({"scores": [0.5, 0.25], "label": 3}, IDS, None),
        ({"input_ids": []}, [], None),
    ],
)
def test_what_rows_say_is_honoured(more, ids, targets):
    read = READER.read({"input_ids": IDS} | more)
    assert read.ids.tolist() == ids
    assert (None if read.targets is None else read.targets.tolist()) == (targets and [bool(one) for one in targets])


REFUSED = {
    "labels": [[[5, 6, 7, 8]], [5, 6, None, 8]],
    "loss_mask": [[1, 1, 2, 1], [1, 1, -100, 1], [1, 1, float("nan"), 1], [1, 1, None, 1]],
    "attention_mask": [[[1, 1, 1, 1]], [1]],
    "position_ids": [[2, 3, 4, 5], [0, 1]],
    "segment_ids": [[1, 1, 2, 2]],
    "token_type_ids": [[0, 0, 1, 1]],
    "seq_idx": [[0, 0, 1, 1]],
    "seq_lengths": [[2, 2]],
    "cu_seqlens": [[0, 2, 4], [[0, 4], 4]],
    "seq_start_id": [[0, 2]],
    "seq_boundaries": [[0, 2, 4]],
    "weight": [0],
    "loss_weights": [[1, 1, 0.5, 1]],
    "token_weights": [[1, "a"]],
    "pixel_values": [[[0.5]]],
}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        *(({"input_ids": ids}, "'input_ids'") for ids in NOT_IDS),
        ({"input_ids": [5, -1]}, "token id -1 "),
        ({"input_ids": [5, 100]}, "token id 100 "),
        *(({name: value}, f"'{name}'") for name, values in REFUSED.items() for value in values),
        ({"labels": [5, 6, 7]}, "'labels' has 3 .* 4"),
        ({"labels": [6, 7, 8, -100]}, "shift them by one"),
        ({"loss_mask": [1, 1, 0.5, 1]}, "'loss_mask' has 0.5"),
        ({"attention_mask": [1, 1, 2, 2]}, "'attention_mask' has 2.*write a row for each"),
        ({"position_ids": [0, 1, 0, 1]}, "'position_ids'.*a row for each"),
        *(({name: 2}, f"'{name}'.*labels") for name in ("prompt_length", "n_prompt_tokens", "answer_start_idx")),
    ],
)
def test_what_cannot_be_honoured_is_refused(more, message):
    with pytest.raises(BadRecordError, match=message):
        READER.read({"input_ids": IDS} | more)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rows_that_end_with_padding_without_a_mask_are_counted(folder):
    rows = [{"input_ids": [*IDS, *[0] * 30]}, {"input_ids": [*IDS, *[0] * 30], "attention_mask": [1] * 4 + [0] * 30}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = DocumentReader(describe_source("rows.jsonl"), READER)
    list(reader)
    assert ["1 of 2 rows" in warning and "attention_mask" in warning for warning in reader.warnings] == [True]


def test_keys_of_rows_that_are_not_read_are_named(folder):
    (folder / "rows.jsonl").write_text(json.dumps({"input_ids": IDS, "attention_mask": [1] * 4, "train": False}) + "\n")
    reader = DocumentReader(describe_source("rows.jsonl"), READER)
    assert len(list(reader)) == 1
    assert ["'train'" in warning and "mask'" not in warning for warning in reader.warnings] == [True]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow", "rows.jsonl"])
def test_rows_are_converted(name):
    docs = documents()
    rows(docs)
    assert_same(windows(config(name)), expected(docs))


def test_rows_that_are_empty_or_padding_add_nothing(folder):
    rows_of = [
        {"input_ids": []},
        {"input_ids": [1, EOS]},
        {"input_ids": [7], "attention_mask": [0]},
        {"input_ids": [2]},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    tokens, firsts, _ = windows(config("rows.jsonl"))
    assert tokens[0, :4].tolist() == [1, EOS, 2, 0]
    assert firsts[0, :3].tolist() == [0, 0, 2]


def test_padding_of_rows_is_dropped():
    docs = documents()
    rows([np.append(ids, [0, 0]) for ids in docs], attention_mask=[[1] * len(ids) + [0, 0, 1] for ids in docs])
    assert_same(windows(config("rows.parquet")), expected(docs))


def test_labels_and_masks_select_the_targets():
    docs = [np.arange(1, 9), np.arange(20, 29)]
    labels = [[-100] * 4 + np.append(ids, EOS).tolist()[4:] for ids in docs]
    masks = [[1] * len(ids) + [0] for ids in docs]
    rows(docs, labels=labels, loss_mask=masks)
    tokens, _, mask = windows(config("rows.parquet"))
    targets = np.roll(tokens, -1, axis=1)[mask]
    assert targets.tolist() == [5, 6, 7, 8, 24, 25, 26, 27, 28]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"labels": [[5, EOS, -100], [5, 6, EOS]]}, r"rows.jsonl:1: .*shift them by one"),
        ({"labels": [[7, 8, EOS], [5, 6, EOS]]}, r"rows.jsonl:1: labels must be the ids"),
        ({"labels": [[4, 5, EOS], None]}, r"rows.jsonl:2: has no labels"),
        ({"loss_mask": [[1, 1], [1, 1, 1]]}, r"rows.jsonl:1: 'loss_mask' has 2 .* 3 "),
        ({"labels": [[0.5] * 3, [0.5] * 3]}, r"rows.jsonl:1: 'labels'"),
    ],
)
def test_wrong_labels_are_named_with_their_row(more, message):
    rows([np.array([4, 5]), np.array([5, 6])], **more)
    with pytest.raises(UserError, match=message):
        windows(config("rows.jsonl"))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl"])
@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_numbers_of_each_token_that_have_no_known_meaning_are_refused(name, on_bad_record):
    rows([np.array([4, 5]), np.array([5, 6])], source=["a", "b"], train_on=[[0, 1, 1], [1, 1, 1]])
    with pytest.raises(UserError, match=rf"{name}:1: 'train_on' has a number for each token"):
        find_cache(config(name, on_bad_record=on_bad_record), "train")


def test_marks_of_tokens_are_not_passed_over_by_the_passthrough_tokenizer():
    rows([np.array([4, 5]), np.array([5, 6])], loss_mask=[[0, 1, 1], [1, 1, 1]])
    settings = {"tokenizer": "passthrough", "vocab_size": 300, "enforce_eos": False, "text_key": "input_ids"}
    for name in ("rows.jsonl", "rows.parquet"):
        wanted = DataConfig(train_urls=[name], cache_dir=name, num_preprocess_workers=1, **settings)
        with pytest.raises(UserError, match=rf"{name}.*'loss_mask' is not read.*input_ids_field: input_ids"):
            list(first_documents(wanted, SEQ_LEN, 1))
