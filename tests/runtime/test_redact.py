"""Masking of secrets: values by their names, and credentials in URLs."""

import copy

import pytest

from lmtrain.runtime.redact import find_masked, find_secrets, redact, without


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:word@host/a.jsonl", "https://***@host/a.jsonl"),
        ("s3://me:word@bucket/a?b=c", "s3://***@bucket/a?b=c"),
        ("s3://AKIA:wo/rd+x/y@bucket/a.jsonl", "s3://***@bucket/a.jsonl"),
        ("zip://a.jsonl::https://me:word@host/a.zip", "zip://a.jsonl::https://***@host/a.zip"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("https://host:8080?a@b", "https://***@b"),  # in doubt it is user info
        ("hf://datasets/owner/name@revision/a", "hf://datasets/owner/name@revision/a"),
        ("", ""),
    ],
)
def test_only_user_info_before_the_host_is_masked(text, expected):
    assert redact(text) == expected


PASSWORDS = ["wo'rd", 'wo"rd', "wo rd", "wo@rd", "wo#?%rd", "wo\\rd", "wo,:;rd)("]
PASSWORDS += ["wo`<rd>", "[word]", "wö漢rd", "12'rd", "$!&*=+~|{}^"]


@pytest.mark.parametrize("password", PASSWORDS)
def test_user_info_is_masked_whatever_its_characters(password):
    for quote in (str, repr, "{}: cannot be read".format, "no host in '{}', line 3".format):
        shown = redact(quote(f"https://me:{password}@host.org:80/a/b.yaml"))
        assert "***@host.org:80/a/b.yaml" in shown
        assert not any(part in shown for part in ("me:", password, "rd"))
        assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("gs://bucket: no such; ask a@b.c", "https://host:8080: refused, mail me@x", "see https://host, or me@x"),
        *('{"url":"https://host/x","mail":"a@b"}', "file:///a:b@c", "'https://host:80', a@b"),
    ],
)
def test_text_around_urls_without_secrets_is_unchanged(text):
    assert redact(text) == text


URL = "https://host/a.jsonl"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?version=1&access_token=abc&x=y", "?version=1&x=y&***"),
        ("?key=abc&alt=media", "?alt=media&***"),
        ("?X-Amz-Algorithm=A&X-Amz-Credential=B%2FC&X-Amz-Date=D&X-Amz-Signature=E&versionId=1", "?versionId=1&***"),
        ("?X-Goog-Credential=a&X-Goog-Date=b&X-Goog-Expires=9&X-Goog-Signature=c&generation=1", "?generation=1&***"),
        ("?AWSAccessKeyId=a&Expires=1&Signature=b&versionId=2", "?versionId=2&***"),
        ("?sv=2024-01-01&se=2026&sr=b&sp=r&sig=a%2Fb%3D&snapshot=1", "?snapshot=1&***"),
        ("?X%2DAmz%2DSignature=abc", "?***"),
        ("?se=1&sv=2&expires=3", "?se=1&sv=2&expires=3"),  # no signature, so they may name the file
        ("?version=1&***", "?version=1&***"),
        ("?token=a'b\"c&v=1", "?v=1&***"),
        ("#access_token=abc&v=1", "#v=1&***"),
        ("#part-2", "#part-2"),
    ],
)
def test_only_parameters_of_credentials_are_masked(query, expected):
    assert redact(URL + query) == URL + expected
    assert redact(redact(URL + query)) == redact(URL + query)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{URL}?sig=abc: not read: 403, url='{URL}?v=1&sig=d'", f"{URL}?***: not read: 403, url='{URL}?v=1&***'"),
        ("see https://a:b@c/d?token=e f", "see https://***@c/d?*** f"),
        ("exceeded with url: /a?X-Amz-Signature=b (Caused by c)", "exceeded with url: /a?*** (Caused by c)"),
        ('{"url": "https://a:b@c/d?sig=e", "f": "g@h"}', '{"url": "https://***@c/d?***", "f": "g@h"}'),
    ],
)
def test_urls_inside_other_text_are_masked(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize(
    "name",
    [
        *("apiKey", "API-KEY", "wandb_api_key", "db_password_2", "client-secret"),
        *("credentials_file", "hub_token", "accessToken", "tracker.token", "aws_access_key_id"),
    ],
)
def test_a_value_is_masked_by_its_name_at_any_depth(name):
    assert redact({name: "abc"}) == {name: "***"}
    assert redact({"a": [{"b": {name: {"c": "abc", "d": ["e"]}}}]}) == {
        "a": [{"b": {name: {"c": "***", "d": ["***"]}}}]
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # texts of a tokenizer or a template
        *((f"{name}_token", "<s>") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "end")),
        # other names that only look similar
        *(("tokenizer", "gpt2"), ("special_tokens", ["<s>"]), ("data_tokens", "abc"), ("text_key", "text")),
        # not texts
        *(("flops_per_token", 1.5), ("max_per_token", 3), ("use_secrets", True), ("api_key", None), ("password", "")),
    ],
)  # fmt: skip
def test_a_value_with_another_name_is_unchanged(name, value):
    assert redact({"a": {name: value}}) == {"a": {name: value}}


def test_names_of_text_sources_are_not_names_of_secrets():
    """Otherwise the run id of a run without secrets would depend on them, and its saved config would not load."""
    config = {
        "data": {
            "configs": {"secrets": {"train_urls": ["a"], "text_key": "b"}},
            "train_weights": [[0, {"secrets": 0.5}]],
        },
        "objective": {"source_weights": {"secrets": 2.0}},
    }
    assert redact(config) == config
    assert redact({"config": config}) == {"config": config}


SECRET = "https://me:word@host/a?signature=abc"


def test_secrets_are_found_in_every_form_in_which_a_library_may_show_them():
    value = {"a": "s3://KEY:p%2Fss@b/c?sig=def&se=2026", "hub_token": "ghi"}
    assert sorted(find_secrets(value)) == ["KEY:p%2Fss", "def", "ghi", "p%2Fss", "p/ss"]
    assert find_secrets(redact(value)) == []


def test_secrets_are_removed_from_other_text_unless_they_are_short():
    text = 'Invalid bucket name "someone:password-1@bucket"; the word password-1'
    assert (
        without(text, ["password-1", "someone:password-1", "word"]) == 'Invalid bucket name "***@bucket"; the word ***'
    )


def test_masked_values_are_found_again():
    value = {"a": [{"password": "b"}, SECRET, "https://host/a?version=1", "***"], "b": {"tokens": {"hub_token": "c"}}}
    before = copy.deepcopy(value)
    assert find_masked(value) == []
    assert find_masked(redact(value)) == [("a", 0, "password"), ("a", 1), ("b", "tokens", "hub_token")]
    assert value == before
