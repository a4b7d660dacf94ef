"""Rows of token ids: what they say of their tokens is honoured or refused, and never passed over."""

import pytest

from lmtrain.preprocess.records import BadRecordError
from lmtrain.preprocess.token_rows import TokenRows

READER = TokenRows("input_ids", 100)
IDS = [5, 6, 7, 8]


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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"input_ids": [5.0, 6.0]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [5, True]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [True, False]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [5, None]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [5, "6"]}, "'input_ids' is not a list of integers"),
        ({"input_ids": ["5", "6"]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [[5, 6], [7, 8]]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [[5, 6], [7]]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [[]]}, "'input_ids' is not a list of integers"),
        ({"input_ids": None}, "'input_ids' is not a list of integers"),
        ({"input_ids": "5 6"}, "'input_ids' is not a list of integers"),
        ({"input_ids": b"\5\0"}, "'input_ids' is not a list of integers"),
        ({"input_ids": 5}, "'input_ids' is not a list of integers"),
        ({"input_ids": {"0": 5}}, "'input_ids' is not a list of integers"),
        ({"input_ids": [5, -1]}, "token id -1 is not in the vocabulary"),
        ({"input_ids": [5, 100]}, "token id 100 is not in the vocabulary"),
        ({"input_ids": [5, 1 << 63]}, "'input_ids' "),
        ({"input_ids": [5, 1 << 70]}, "'input_ids' is not a list of integers"),
        ({"labels": [5, 6, 7]}, "'labels' has 3 numbers, but there are 4"),
        ({"labels": [[5, 6, 7, 8]]}, "'labels' is not a list"),
        ({"labels": [5, 6, None, 8]}, "'labels' is not a list"),
        ({"labels": [6, 7, 8, -100]}, "shift them by one"),
        ({"loss_mask": [1, 1, 0.5, 1]}, "'loss_mask' has 0.5"),
        ({"loss_mask": [1, 1, 2, 1]}, "'loss_mask' has 2"),
        ({"loss_mask": [1, 1, -100, 1]}, "'loss_mask' has -100"),
        ({"loss_mask": [1, 1, float("nan"), 1]}, "'loss_mask' has nan"),
        ({"loss_mask": [1, 1, None, 1]}, "'loss_mask' is not a list"),
        ({"attention_mask": [1, 1, 2, 2]}, "'attention_mask' has 2.*write a row for each"),
        ({"attention_mask": [[1, 1, 1, 1]]}, "'attention_mask' is not a list"),
        ({"attention_mask": [1]}, "'attention_mask' has 1 numbers"),
        ({"position_ids": [0, 1, 0, 1]}, "'position_ids'.*a row for each"),
        ({"position_ids": [2, 3, 4, 5]}, "'position_ids'"),
        ({"position_ids": [0, 1]}, "'position_ids' has 2 numbers"),
        ({"segment_ids": [1, 1, 2, 2]}, "'segment_ids'.*a row for each"),
        ({"token_type_ids": [0, 0, 1, 1]}, "'token_type_ids'"),
        ({"seq_idx": [0, 0, 1, 1]}, "'seq_idx'"),
        ({"seq_lengths": [2, 2]}, "'seq_lengths'.*a row for each"),
        ({"cu_seqlens": [0, 2, 4]}, "'cu_seqlens'"),
        ({"cu_seqlens": [[0, 4], 4]}, "'cu_seqlens'"),
        ({"weight": 0}, "'weight' has weights other than 1"),
        ({"loss_weights": [1, 1, 0.5, 1]}, "'loss_weights' has weights other than 1"),
        ({"token_weights": [1, "a"]}, "'token_weights' has weights other than 1"),
        ({"prompt_length": 2}, "'prompt_length'.*add labels or a loss_mask"),
        ({"pixel_values": [[0.5]]}, "'pixel_values' is an input of another kind of model"),
    ],
)
def test_what_cannot_be_honoured_is_refused(more, message):
    with pytest.raises(BadRecordError, match=message):
        READER.read({"input_ids": IDS} | more)
