"""Documents of single records, and what is wrong with damaged ones."""

import pytest

from lmtrain.preprocess.records import BadRecordError, Texts, TokenIds, read_document


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (["text"], "expected a JSON object with the key 'text'"),
        ("text", "expected a JSON object with the key 'text'"),
        ({"body": "a", "id": 1}, "no key 'text' (it has 'body', 'id'); set data.text_key to the key"),
        ({}, "no key 'text' (it has none)"),
        ({"messages": []}, "set data.format: {type: chat} to read conversations"),
        ({"conversations": []}, "set data.format: {type: chat} to read conversations"),
        ({"prompt": "a", "completion": "b"}, "set data.format: {type: completion} to read prompts with completions"),
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


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 7], "token id 7 is not below data.vocab_size 7"),
        ([-1], "token id -1 is not below data.vocab_size 7"),
        ("text", "'ids' is not a list of token ids"),
        ([1.0], "'ids' is not a list of token ids"),
        ([True], "'ids' is not a list of token ids"),
    ],
)
def test_token_ids_are_below_the_vocabulary_size(ids, message):
    reader = TokenIds(key="ids", vocab_size=7)
    assert read_document(reader, {"ids": [0, 6]}) == [0, 6]
    with pytest.raises(BadRecordError) as caught:
        read_document(reader, {"ids": ids})
    assert str(caught.value).startswith(message)
