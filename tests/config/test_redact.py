"""Secrets in URLs do not leave the process."""

import pytest

from lmtrain.config.redact import redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:word@host/a.jsonl", "https://***@host/a.jsonl"),
        ("https://token@host/a", "https://***@host/a"),
        ("https://host/a.jsonl?X-Amz-Signature=abc&x=y", "https://host/a.jsonl?***"),
        ("s3://me:word@bucket/a?b=c", "s3://***@bucket/a?***"),
        ("see https://a:b@c/d?e f", "see https://***@c/d?*** f"),
        ("gs://bucket/train.{1..8}.jsonl", "gs://bucket/train.{1..8}.jsonl"),
        ("folder/what?.jsonl", "folder/what?.jsonl"),
        ("gs://bucket/a@b/c", "gs://bucket/a@b/c"),
        ("me@host", "me@host"),
        ("", ""),
    ],
)
def test_passwords_and_signatures_are_taken_out_of_urls_and_nothing_else(text, expected):
    assert redact(text) == expected


def test_texts_at_any_depth_are_redacted_and_the_original_is_left_alone():
    value = {"a": [{"b": "x://p@q"}], "x://p@q": 3, "c": None, "d": (1.5, True)}
    assert redact(value) == {"a": [{"b": "x://***@q"}], "x://p@q": 3, "c": None, "d": (1.5, True)}
    assert value["a"][0]["b"] == "x://p@q"
